"""The policy `auto` of the data-parallel axis: which buckets go compressed.

Buckets of one collective whose sizes have the same power of two in common (rounded) are a class;
the largest one of it anywhere in the world is measured, on the group that will send it. Pipeline
stages have other buckets: a rank without one of a class takes part in the clocks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import measure
from megatron_taco.collectives.policy import Fact, Measured, Policy
from megatron_taco.config.canonical import flatten
from megatron_taco.config.data_parallel import DataParallel
from megatron_taco.patching.choice import choose
from megatron_taco.patching.data import DataParallelHooks
from megatron_taco.patching.data_trial import Key, TrialBucket, compressed_buckets, send
from megatron_taco.patching.run_facts import current_device, machine
from megatron_taco.patching.stored_policy import DATA_ATTRIBUTE

_NOT_OF_A_POLICY = ("mode", "start_step", "gradients.memory")


class BucketPolicy:
    """Chooses by measurement which buckets go compressed.

    Args:
        hooks: Of the data-parallel axis.
        settings: Section ``compression.data_parallel``.
        distributed_optimizer: Whether gradients are reduce-scattered.
        file: Where rank 0 keeps the policy, or None.
        say: Prints a line from rank 0.
        show: Prints a table from rank 0.

    Attributes:
        policy: What was chosen; None before ``run``.
    """

    def __init__(
        self,
        hooks: DataParallelHooks,
        settings: DataParallel,
        *,
        distributed_optimizer: bool,
        file: Path | None,
        say: Callable[[str], None],
        show: Callable[[Table], None],
    ) -> None:
        self._hooks = hooks
        self._settings = settings
        self._distributed_optimizer = distributed_optimizer
        self._file = file
        self._say = say
        self._show = show
        self.policy: Policy | None = None

    def run(self) -> None:
        """Choose, and mark the buckets that go plain; a collective call of all ranks."""
        from megatron.training import get_args

        args = get_args()
        sharded = self._distributed_optimizer
        own = list(compressed_buckets(self._hooks, distributed_optimizer=sharded))
        classes = self._classes(own)
        facts: dict[str, Fact] = machine(args)
        for key, value in flatten(self._settings.plain()).items():
            if key not in _NOT_OF_A_POLICY:
                facts[f"compression.data_parallel.{key}"] = value
        facts["buckets"] = ", ".join(f"{k[0]} {k[1]} {n[0]}" for k, n in classes.items())
        policy = choose(
            args,
            facts,
            lambda: [self._measure(key, classes[key], own) for key in classes],
            say=self._say,
            show=self._show,
            file=self._file,
            name="data-parallel policy",
            attribute=DATA_ATTRIBUTE,
        )
        self.policy = policy
        for bucket in own:
            bucket.plan.by_policy = not policy.compresses(*bucket.key[:2], bucket.nbytes)
        if not classes:
            self._say("data-parallel policy: no bucket reaches min_bytes; all go plain")
        elif policy.all_plain:
            self._say("data-parallel policy: every bucket goes plain, uncompressed")

    def _classes(self, own: list[TrialBucket]) -> dict[Key, tuple[int, int, int]]:
        """Bytes, and bytes sent plain and compressed, of the largest bucket of each class."""
        mine: dict[Key, tuple[int, int, int]] = {}
        for bucket in own:
            hops = self._hooks.sends.hops(bucket.plan, bucket.group)
            sizes = (bucket.nbytes, *bucket.bytes_sent(hops))
            mine[bucket.key] = max(sizes, mine.get(bucket.key, sizes))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        found: dict[Key, tuple[int, int, int]] = {}
        for theirs in every:
            for key, sizes in theirs.items():
                found[key] = max(sizes, found.get(key, sizes))
        return dict(sorted(found.items()))

    def _measure(self, key: Key, sizes: tuple[int, int, int], own: list[TrialBucket]) -> Measured:
        role, collective, _ = key
        candidates = [bucket for bucket in own if bucket.key == key]
        bucket = max(candidates, key=lambda b: b.nbytes, default=None)
        plain_s, compressed_s = self._times(collective, bucket)
        nbytes, raw, wire = sizes
        return Measured(
            role=role,
            collective=collective,
            nbytes=nbytes,
            raw=raw,
            wire=wire,
            plain_s=plain_s,
            compressed_s=compressed_s,
        ).decided()

    def _times(self, collective: str, bucket: TrialBucket | None) -> tuple[float, float]:
        from megatron.core import parallel_state

        if bucket is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            return measure.time_pair(
                collective,
                numel=group.size(),
                dtype=torch.float32,
                device=current_device(),
                group=group,
                plain=lambda *_: None,
                compressed=lambda *_: None,
            )
        return measure.time_pair(
            collective,
            numel=bucket.plan.numel,
            dtype=bucket.flat.dtype,
            device=bucket.flat.device,
            group=bucket.group,
            plain=measure.plain_send,
            compressed=lambda _, output, input, group: self._send(bucket, output, input, group),
        )

    def _send(
        self, bucket: TrialBucket, output: Tensor, input: Tensor, group: ProcessGroup
    ) -> None:
        send(self._hooks, bucket, output, input, group)
