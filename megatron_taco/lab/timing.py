"""Times one collective at a time, on all ranks together, each after a silence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

SILENCE_S = 0.05
"""Long enough for the bucket of every rate to fill: the worst case for the link's honesty."""


@contextmanager
def process_group() -> Iterator[tuple[ProcessGroup, torch.device]]:
    """The group of all ranks that a launcher started, and this rank's device, for a context.

    NCCL and a GPU where torch sees one, else gloo and the CPU.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("torch has no default process group after init_process_group")
        yield group, device
    finally:
        dist.destroy_process_group()


class Timer:
    """Times calls that all ranks of a group make together."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, silence_s: float = SILENCE_S
    ) -> None:
        """Remembers where to time.

        Args:
            group: The ranks.
            device: Whose work to wait for.
            silence_s: Seconds without traffic before each call.
        """
        self._group = group
        self._device = device
        self._silence_s = silence_s

    def time(self, call: Callable[[], object]) -> float:
        """Returns the seconds from when all ranks were ready until ``call`` was done on this one.

        Host time, launching included; the device is idle before and after.
        """
        self._align()
        time.sleep(self._silence_s)
        self._align()
        start = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - start

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Returns for each of the times the longest that a rank saw; a collective is done then."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in values.tolist()]

    def total(self, values: Tensor) -> list[float]:
        """Returns the sums over the ranks of some numbers, FP64 [n] on the timer's device."""
        dist.all_reduce(values, group=self._group)
        return [float(value) for value in values.tolist()]

    def _align(self) -> None:
        dist.barrier(group=self._group)
        self._synchronise()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
