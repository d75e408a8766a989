"""What the buckets of the data-parallel axis sent, counted by kind of parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import buckets
from megatron_taco.collectives.router import FlowCounter
from megatron_taco.collectives.traffic import Traffic
from megatron_taco.compressors import Compressor
from megatron_taco.patching.data_plans import Plan, Stream
from megatron_taco.patching.data_sync import Moment

Counter = Callable[[str, str], FlowCounter]
"""Gives the counter of a role's collective."""


class BucketCounts:
    """Counts calls and bytes, and what does not survive encoding.

    Args:
        counter: Gives the counters.
        moment: The step that runs.
    """

    def __init__(self, counter: Counter, moment: Moment) -> None:
        self._counter = counter
        self._moment = moment

    def bucket(self, plan: Plan, collective: str, group: ProcessGroup, compressed: bool) -> None:
        """Count a whole bucket in a collective of Megatron's."""
        sent = plan.traffic(collective, group.rank(), group.size(), compressed)
        self.add(plan, collective, sent, compressed)

    def add(self, plan: Plan, collective: str, sent: dict[str, Traffic], compressed: bool) -> None:
        """Count what was sent of each kind of a bucket."""
        size = plan.numel * plan.itemsize
        stream = plan.stream
        for kind, traffic in stream.counted(sent).items():
            count = self._counter(f"{stream.role}.{kind}", collective)
            count.seen += 1
            count.largest = max(count.largest, size)
            count.raw += traffic.raw
            count.wire += traffic.wire
            if not stream.is_exact(kind):
                count.compressed += int(compressed)
                count.small += int(not compressed and size < stream.min_bytes)
                count.by_policy += int(not compressed and plan.by_policy)

    def outer(self, stream: Stream, kind: str, nbytes: int) -> None:
        """Count what an exchange of parameters sent, beside the gradients it stands for."""
        self._counter(f"{stream.role}.{kind}", "all_reduce").wire += nbytes

    def nonfinite(self, plan: Plan, collective: str, bad: Tensor) -> None:
        """Count, under a method's name, gradients that hold what is no number: 0-dim."""
        count = self._counter(f"{plan.stream.role}.{plan.stream.method}", collective)
        count.add_nonfinite(bad)

    def observer(self, plan: Plan, collective: str) -> buckets.OnPart:
        """Return what looks at each payload of a bucket."""

        def on_part(kind: str, values: Tensor, payload: Tensor, compressor: Compressor) -> None:
            count = self._counter(f"{plan.stream.role}.{kind}", collective)
            count.add_nonfinite(compressor.nonfinite_blocks(payload, values.numel()))
            if self._moment.sampling:
                decoded = compressor.decode_rows(payload, values.numel(), torch.float32)
                count.add_error(values.float(), decoded[0])

        return on_part
