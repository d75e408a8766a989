"""How far boundaries change what passes them, sampled in some steps.

The exact tensor is what a boundary codes: the activation without its anchors, forward; the gradient
of what crossed, backward. Anchors are left out since each stage takes its own off and puts its own
on, and a stage knows no other's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Boundary
from megatron_taco.telemetry.counters import FlowCount


class BoundaryErrors:
    """Samples of this process, by boundary.

    Attributes:
        sampling: whether samples are taken in the step that runs.
    """

    def __init__(self) -> None:
        self.sampling = False
        self._counts: dict[int, FlowCount] = {}

    @torch.no_grad()
    def sample(self, boundary: Boundary, x: Tensor, ids: Tensor | None, flow: FlowCount) -> None:
        """Take a sample of what enters a boundary in training, [s, b, d].

        Args:
            boundary: a sender, or one in place.
            x: what it encodes.
            ids: token ids int64 [b, s], or None.
            flow: of its messages; the sample is added there, too.
        """
        pair = boundary.error_pair(x.detach(), ids)
        if pair is None:
            return
        exact, decoded = (each.float() for each in pair)
        for count in (flow, self._counts.setdefault(boundary.place.index, FlowCount())):
            count.add_error(exact, decoded)

    def take(self, boundaries: int) -> list[float | None]:
        """The relative errors since the last call, over all ranks; a collective call.

        Args:
            boundaries: of the whole model.

        Returns:
            Root mean square error over root mean square of each boundary, None without a sample.
        """
        rows = [[0.0, 0.0] for _ in range(boundaries)]
        for number, count in self._counts.items():
            rows[number - 1] = list(count.error_sample)
        self._counts.clear()
        device = torch.device(torch.cuda.current_device())
        table = torch.tensor(rows, dtype=torch.float64, device=device)
        dist.all_reduce(table)
        return [(total / samples) ** 0.5 if samples else None for total, samples in table.tolist()]


def with_errors(
    figures: dict[str, dict[str, float]], errors: Sequence[float | None], depths: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Figures by boundary with their errors, where there are any.

    Args:
        figures: see ``boundary_report.step_figures``.
        errors: see :meth:`BoundaryErrors.take`.
        depths: of all boundaries.
    """
    found = dict(figures)
    for depth, error in zip(depths, errors, strict=True):
        if error is not None:
            name = f"after_layer_{depth}"
            found[name] = {**found.get(name, {}), "error": error}
    return found
