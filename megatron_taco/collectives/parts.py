"""A collective that is sent in parts, each as soon as it is computed or needed.

The parts are messages of their own, yet the result has the very bits of the whole one: parts end
where the compressor's blocks end, and a block's codes depend on that block alone.  Whether the
collective is compressed is asked once, for the whole; it is also counted once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.all_gather import all_gather
from megatron_taco.collectives.all_reduce import OnPayload, all_reduce
from megatron_taco.collectives.reduce_scatter import reduce_scatter
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor

Send = Callable[[Tensor, Tensor, Callable[[OnPayload], Any]], Any]
"""Counts a part and sends it: the part as all ranks hold it together, what this rank encodes of it,
and the call, which takes the observer of the payloads."""


def part_ranges(rows: int, row_elements: int, unit: int, parts: int) -> list[tuple[int, int]]:
    """Cut rows into parts of about the same size that hold whole units, all but the last.

    Args:
        rows: rows to be cut: tokens, all in one place in memory one after the other.
        row_elements: elements of a row.
        unit: elements of a unit, one block of the compressor or several.
        parts: how many parts are wanted.

    Returns:
        Ranges ``[first, last)`` in order that hold all rows: ``parts`` of them, or fewer where
        there are not as many places to cut.
    """
    step = unit // math.gcd(unit, row_elements)
    units = -(-rows // step)
    count = max(1, min(parts, units))
    ends = [min(rows, units * part // count * step) for part in range(count + 1)]
    return list(itertools.pairwise(ends))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The collective under way; one method call a part, in the same order on all ranks.

    Attributes:
        compressor: encodes the parts.
        algorithm: of the all-reduce.
        group: the process group.
        send: counts and sends.
    """

    compressor: Compressor
    algorithm: str
    group: ProcessGroup
    send: Send

    def all_reduce(self, tensor: Tensor) -> Work:
        """Begin the sum of a part over the group, in place; any shape."""
        call = partial(self._call, all_reduce, tensor, algorithm=self.algorithm)
        return cast(Work, self.send(tensor, tensor, call))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        """Begin a part whose row ``r``, of ``input`` [P, n], is summed on rank ``r``: [n]."""
        return cast(
            Work, self.send(input, input, partial(self._call, reduce_scatter, output, input))
        )

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Begin a part, ``input`` [n], that goes to row ``r`` of all ranks' ``output`` [P, n]."""
        call = partial(self._call, all_gather, output, input)
        return cast(Work, self.send(output, input, call))

    def _call(self, *arguments: Any, **settings: Any) -> Any:
        collective, *tensors, observer = arguments
        return collective(
            *tensors,
            group=self.group,
            compressor=self.compressor,
            async_op=True,
            on_payload=observer,
            **settings,
        )
