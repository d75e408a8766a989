"""What is reported of the projectors, combined over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import degrees

import torch
import torch.distributed as dist

from megatron_taco.boundaries import Boundary, StepReport

Figures = dict[str, dict[str, float]]


def step_figures(
    boundaries: Mapping[int, Boundary], reports: Mapping[int, StepReport], depths: Sequence[int]
) -> Figures:
    """Figures of the last step by boundary; a collective call.

    Args:
        boundaries: of this process, by number from 1.
        reports: of the last step, by number.
        depths: of all boundaries.

    Returns:
        For each ``after_layer_N`` with a projector that moves: ``orthonormality``, max |A'A - I|
        of the FP32 master after the last step, ``moved``, the root mean square sine of the angles
        that it turned by, and ``repairs`` so far.
    """
    rows = []
    for number in range(1, len(depths) + 1):
        report, boundary = reports.get(number), boundaries.get(number)
        projector = None if boundary is None else boundary.projector
        if report is None or projector is None:
            rows.append([-1.0, -1.0, -1.0])
        else:
            rows.append([report.orthonormality, report.moved, float(projector.repairs)])
    names = ("orthonormality", "moved", "repairs")
    return {
        f"after_layer_{depth}": dict(zip(names, row, strict=True))
        for depth, row in zip(depths, _largest(rows), strict=True)
        if row[0] >= 0.0
    }


def angles(boundaries: Mapping[int, Boundary], depths: Sequence[int]) -> Figures:
    """Principal angles in degrees between each projector's subspace now and at the start.

    Two eigenvalue decompositions [r, r] each; a collective call. Projectors that do not move are
    left out.

    Args:
        boundaries: of this process, by number from 1.
        depths: of all boundaries.
    """
    rows = []
    for number in range(1, len(depths) + 1):
        boundary = boundaries.get(number)
        projector = None if boundary is None else boundary.projector
        if projector is None or projector.update == "none":
            rows.append([-1.0, -1.0])
        else:
            moved = projector.angles_moved()
            rows.append([degrees(float(moved.median())), degrees(float(moved.max()))])
    return {
        f"after_layer_{depth}": {"median": row[0], "largest": row[1]}
        for depth, row in zip(depths, _largest(rows), strict=True)
        if row[0] >= 0.0
    }


def _largest(rows: list[list[float]]) -> list[list[float]]:
    """The maximum over all ranks: both ends have the same figures, the others -1."""
    device = torch.device(torch.cuda.current_device())
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    found: list[list[float]] = table.tolist()
    return found
