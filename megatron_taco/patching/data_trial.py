"""Buckets sent on trial, with values of no meaning: to measure, and to compile kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import measure
from megatron_taco.patching.data import DataParallelHooks
from megatron_taco.patching.data_plans import Hops, Plan
from megatron_taco.patching.run_facts import current_device

Key = tuple[str, str, int]
"""Role, collective, rounded logarithm of the size."""


@dataclass(frozen=True)
class TrialBucket:
    """A bucket of this rank: its flat tensor, plan and group, and how it is sent."""

    flat: Tensor
    plan: Plan
    group: ProcessGroup
    collective: str

    @property
    def nbytes(self) -> int:
        """Size of the whole bucket."""
        return self.plan.numel * self.plan.itemsize

    @property
    def key(self) -> Key:
        """What it has in common with others of its class."""
        return self.plan.stream.role, self.collective, round(math.log2(max(1, self.nbytes)))

    def bytes_sent(self, hops: Hops | None) -> tuple[int, int]:
        """What a rank sends of it, plain and compressed, in all hops."""
        rank, size = self.group.rank(), self.group.size()
        sent = list(self.plan.traffic(self.collective, rank, size, compressed=True).values())
        raw = sum(t.raw for t in sent)
        if hops is not None and self.collective == "reduce_scatter":
            sent = [*hops.inside.values(), *hops.between.values()]
        return raw, sum(t.wire for t in sent)


def compressed_buckets(
    hooks: DataParallelHooks, *, distributed_optimizer: bool
) -> Iterator[TrialBucket]:
    """Every bucket of this rank that a compressor takes.

    Args:
        hooks: Of the data-parallel axis.
        distributed_optimizer: Whether gradients are reduce-scattered.
    """
    reduction = "reduce_scatter" if distributed_optimizer else "all_reduce"
    for flat, collective in (("grad_data", reduction), ("param_data", "all_gather")):
        plans = hooks.plans.get(flat)
        if plans is None or plans.stream.compressor is None:
            continue
        for bucket, plan, group in hooks.buckets(flat):
            if plan.compresses:
                yield TrialBucket(getattr(bucket, flat), plan, group, collective)


def send(
    hooks: DataParallelHooks,
    bucket: TrialBucket,
    output: Tensor,
    input: Tensor,
    group: ProcessGroup,
) -> None:
    """Send ``input`` as ``bucket`` would be sent compressed, into ``output``; nothing is counted.

    Args:
        hooks: Of the data-parallel axis.
        bucket: The bucket.
        output: As ``measure.tensors`` returns it.
        input: Likewise.
        group: The group.
    """
    sends, plan = hooks.sends, bucket.plan
    if bucket.collective == "all_gather":
        handle = sends.gathered(output, input.float(), plan, group, _unseen)
    elif bucket.collective == "all_reduce":
        handle = sends.all_reduced(output, plan, group, False, _unseen)
    else:
        handle = sends.reduce_scattered(output, input, plan, group, False, lambda _: _unseen)
    handle.wait()


def compile_kernels(hooks: DataParallelHooks, *, distributed_optimizer: bool) -> str:
    """Send every compressed bucket once, before a step has to; a collective call of all ranks.

    Args:
        hooks: Of the data-parallel axis.
        distributed_optimizer: Whether gradients are reduce-scattered.

    Returns:
        How long it took, a line for the console.
    """
    clock = measure.clock_of(current_device())
    start = time.perf_counter()
    count = 0
    for bucket in compressed_buckets(hooks, distributed_optimizer=distributed_optimizer):
        flat, group = bucket.flat, bucket.group
        output, input = measure.tensors(
            bucket.collective, bucket.plan.numel, flat.dtype, flat.device, group.size()
        )
        send(hooks, bucket, output, input, group)
        count += 1
    clock()  # waits for the device
    seconds = time.perf_counter() - start
    return f"data-parallel kernels compiled in {seconds:.1f} s, by sending {count} buckets"


def _unseen(*_: Any) -> None:
    """What looks at payloads on trial."""
