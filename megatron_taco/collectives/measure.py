"""Times the plain and the compressed form of a collective on the group that will use it.

Both are called in turn, so that what else happens on the link meets both. Each repetition counts
with its slowest rank in the world (all groups measure at the same time, as they will communicate at
the same time), and the medians of the repetitions are compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Clock = Callable[[], float]
Send = Callable[[str, Tensor, Tensor, ProcessGroup], object]
"""Runs a collective: its name, output, input (the same tensor for all-reduce) and group."""

BUDGET_S = 3.0
"""About how long one collective may be measured; slow links get fewer repetitions."""
FEWEST, MOST = 3, 9
"""Repetitions."""
LONG_ENOUGH_S = 2e-3
"""Shorter calls are timed several at a time, since waiting for the device takes time itself."""
MOST_CALLS = 8


def clock_of(device: torch.device) -> Clock:
    """Returns a clock in seconds that first waits for all work given to ``device``."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def plain_send(collective: str, output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Runs a collective as Megatron does.

    Raises:
        KeyError: ``collective`` is unknown.
    """
    {
        "all_reduce": lambda: dist.all_reduce(output, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, input, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(output, input, group=group),
    }[collective]()


def tensors(
    collective: str, numel: int, dtype: torch.dtype, device: torch.device, world_size: int
) -> tuple[Tensor, Tensor]:
    """Returns output and input of a collective whose whole tensor has ``numel`` elements.

    Gaussian values from a generator of their own: the run's random state is left alone.
    """
    generator = torch.Generator(device=device).manual_seed(1)
    whole = torch.empty(numel, dtype=dtype, device=device).normal_(generator=generator)
    if collective == "all_reduce":
        return whole, whole
    part = whole[: numel // world_size].clone()
    return (part, whole) if collective == "reduce_scatter" else (whole, part)


def time_pair(
    collective: str,
    *,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup,
    plain: Send,
    compressed: Send,
) -> tuple[float, float]:
    """Times one collective plain and compressed; every rank of the world calls it alike.

    Args:
        collective: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        numel: Elements of the whole tensor: a multiple of the size of the group.
        dtype: Its dtype.
        device: Where it is.
        group: The group of this rank that communicates.
        plain: Runs it plain.
        compressed: Runs it compressed.

    Returns:
        Seconds of a plain and of a compressed call: medians over the repetitions of the slowest
        rank's time, the same on all ranks.
    """
    output, input = tensors(collective, numel, dtype, device, group.size())
    now = clock_of(device)
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    large = input if collective != "all_gather" else output

    def seconds(send: Send, calls: int) -> float:
        # Sums in place would grow until they overflow.
        large.normal_(generator=torch.Generator(device=device).manual_seed(2))
        dist.all_reduce(flag, group=group)  # ranks begin together
        begin = now()
        for _ in range(calls):
            send(collective, output, input, group)
        return (now() - begin) / calls

    with torch.no_grad():
        seconds(plain, 1), seconds(compressed, 1)  # connections, kernels
        first = slowest([[seconds(plain, 1), seconds(compressed, 1)]], device)[0]
        calls, repetitions = schedule(*first)
        rows = []
        for repetition in range(repetitions):
            if repetition % 2:
                late = seconds(compressed, calls)
                rows.append([seconds(plain, calls), late])
            else:
                rows.append([seconds(plain, calls), seconds(compressed, calls)])
    plain_s, compressed_s = map(list, zip(*slowest(rows, device), strict=True))
    return statistics.median(plain_s), statistics.median(compressed_s)


def schedule(plain_s: float, compressed_s: float) -> tuple[int, int]:
    """Returns how many calls to time at once, and how often, for calls that take so long."""
    shortest = max(min(plain_s, compressed_s), 1e-6)
    calls = max(1, min(MOST_CALLS, math.ceil(LONG_ENOUGH_S / shortest)))
    pair = max(calls * (plain_s + compressed_s), 1e-6)
    return calls, max(FEWEST, min(MOST, int(BUDGET_S / pair)))


def slowest(rows: Sequence[Sequence[float]], device: torch.device) -> list[list[float]]:
    """Returns each number's maximum over all ranks of the world."""
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    numbers: list[list[float]] = table.tolist()
    return numbers
