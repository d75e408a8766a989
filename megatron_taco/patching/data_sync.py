"""A bucket group while it starts its collectives: its buckets, and what Megatron is to wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.patching.data_plans import Plans
from megatron_taco.telemetry.costs import Cost

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Moment:
    """The training step that runs now, counted from 0, and whether errors are sampled in it."""

    step: int = 0
    sampling: bool = False


class Handles:
    """What Megatron waits for instead of torch's coalescing manager; counts the time it takes."""

    def __init__(self, cost: Cost) -> None:
        self._handles: list[Any] = []
        self._cost = cost

    def append(self, handle: Any) -> None:
        """Add a handle under way; None, of a collective that is done, is left out."""
        if handle is not None:
            self._handles.append(handle)

    def wait(self) -> None:
        """Wait for all, in the order in which they were started."""
        handles, self._handles = self._handles, []
        with self._cost.timed():
            for handle in handles:
                handle.wait()


@dataclass
class Sync:
    """A bucket group that starts its collectives now: what they are to become."""

    buckets: list[Any]
    plans: Plans
    compressed: bool
    handles: Handles


class Syncing(threading.local):
    """The bucket group that starts its collectives in this thread, if one does."""

    now: Sync | None = None

    @contextlib.contextmanager
    def of(self, sync: Sync, cost: Cost) -> Iterator[None]:
        """Be of this bucket group meanwhile; the time it takes is counted if it is compressed."""
        saved, self.now = self.now, sync
        try:
            with cost.timed() if sync.compressed else contextlib.nullcontext():
                yield
        finally:
            self.now = saved

    def find(self, tensor: Tensor, flat: str) -> tuple[Sync, Any] | None:
        """The bucket whose flat tensor this is, if its group is being synchronised.

        Args:
            tensor: What a collective of Megatron's works on.
            flat: ``grad_data`` or ``param_data``.
        """
        if self.now is not None:
            for bucket in self.now.buckets:
                if getattr(bucket, flat) is tensor:
                    return self.now, bucket
        return None


def is_ours(group: Any, flat: str) -> bool:
    """Tell whether a bucket group has more than one rank, and no expert or special bucket."""
    return group_of(group).size() > 1 and all(
        getattr(bucket, flat) is not None
        and getattr(bucket, flat).dtype in _DTYPES
        and all(getattr(parameter, "allreduce", True) for parameter in bucket.params)
        for bucket in group.buckets
    )


def group_of(group: Any) -> ProcessGroup:
    """The ranks over which a bucket group reduces and gathers."""
    ranks: ProcessGroup
    if group.ddp_config.use_distributed_optimizer:
        ranks = group.intra_distributed_optimizer_instance_group
    else:
        ranks = group.data_parallel_group
    return ranks
