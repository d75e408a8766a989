"""Both ends of a boundary, and all replicas of each, must hold the same bits: a proof by hash."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Boundary
from megatron_taco.boundaries.state import fingerprint


class DisagreementError(RuntimeError):
    """Two processes hold different state of one boundary."""


def check_agreement(boundaries: Mapping[int, Boundary], count: int, device: torch.device) -> None:
    """Compare the shared state of every boundary over all ranks; every rank calls it.

    Args:
        boundaries: of this process, by number from 1.
        count: boundaries of the whole model.
        device: of the collectives.

    Raises:
        DisagreementError: on every rank, with the boundaries, what differs and the ranks.
    """
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    smallest = torch.full((count,), highest, dtype=torch.int64, device=device)
    largest = torch.full((count,), lowest, dtype=torch.int64, device=device)
    for number, boundary in boundaries.items():
        state = boundary.shared_state()
        if state:
            smallest[number - 1] = largest[number - 1] = fingerprint(*state.values())
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    # Where nobody has state, the smallest is still above the largest.
    differing = [int(n) + 1 for n in torch.nonzero(smallest < largest)]
    if differing:
        raise DisagreementError(_describe(boundaries, differing))


def _describe(boundaries: Mapping[int, Boundary], differing: list[int]) -> str:
    """Say which ranks hold what, from a gather that only a failing run pays for."""
    mine: dict[tuple[int, str], int] = {
        (number, name): int(fingerprint(tensor))
        for number in differing
        if number in boundaries
        for name, tensor in _state(boundaries[number]).items()
    }
    everyone: list[dict[tuple[int, str], int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    lines = []
    for number, name in sorted({key for held in everyone for key in held}):
        ranks: dict[int, list[int]] = {}
        for rank, held in enumerate(everyone):
            if (number, name) in held:
                ranks.setdefault(held[number, name], []).append(rank)
        if len(ranks) > 1:
            groups = " | ".join(map(str, sorted(ranks.values())))
            lines.append(f"boundary {number}: the {name} differs between ranks {groups}")
    lines.append(
        "all begin with one rank's bits and take the same steps, so the devices of these ranks "
        "round the same products differently (other kinds of GPU or CPU, or other libraries), or "
        "one of them has a fault"
    )
    return "; ".join(lines)


def _state(boundary: Boundary) -> Mapping[str, Tensor]:
    return boundary.shared_state()
