"""A collective that is sent in parts, each as soon as it is computed or needed.

The parts are messages of their own, yet the result has the very bits of the whole one: parts end
where the compressor's blocks end, and a block's codes depend on that block alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from torch import Tensor

from megatron_taco.collectives.work import Work

SendPart = Callable[[Tensor, Tensor], Work]
"""Begins one part of a collective, given its output and input as the whole collective takes them:
of an all-reduce twice the tensor, of a reduce-scatter [n] and [P, n], of an all-gather [P, n] and
[n]. Parts come in the same order on all ranks."""


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
