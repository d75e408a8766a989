"""What each communication role sent: calls, bytes, and sampled errors.

A *flow* is a role (what the tensor is: ``tp.forward``) together with the collective that moved it
(``all_reduce``).  Byte figures are exact and kept on the host; errors and non-finite blocks are
accumulated in device tensors and read only when a report is made, so counting never synchronises
the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Flow(NamedTuple):
    """A role and the collective that moves it."""

    role: str
    collective: str

    def __str__(self) -> str:
        return f"{self.role} {self.collective}"


@dataclass
class FlowCount:
    """Counts of one flow on one rank since the run started.

    Attributes:
        seen: calls that reached the hook.
        small: of these, calls below ``min_bytes``, sent plain.
        by_policy: of these, large enough calls that the policy sent plain.
        compressed: of these, calls that went compressed.
        raw: bytes a ring would have made this rank send for the plain tensors.
        wire: bytes this rank did send.
        largest: size of the largest plain message, in bytes.
    """

    seen: int = 0
    small: int = 0
    by_policy: int = 0
    compressed: int = 0
    raw: int = 0
    wire: int = 0
    largest: int = 0
    _nonfinite: Tensor | None = field(default=None, repr=False)
    _error: Tensor | None = field(default=None, repr=False)

    def add_nonfinite(self, blocks: Tensor) -> None:
        """Add a 0-dim count of blocks that held a NaN or an Inf (stays on its device)."""
        self._nonfinite = blocks if self._nonfinite is None else self._nonfinite + blocks

    def add_error(self, exact: Tensor, decoded: Tensor) -> None:
        """Add one sample of the codec's error; a tensor with a NaN or an Inf is no sample."""
        # Scaled by the largest magnitude first, so that the squares cannot overflow.
        scale = exact.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        error = ((decoded - exact) / scale).double().square().sum()
        signal = (exact / scale).double().square().sum()
        ratio = error / signal.clamp_min(1e-300)
        finite = ratio.isfinite()
        sample = torch.stack([torch.where(finite, ratio, 0.0), finite.to(ratio.dtype)])
        self._error = sample if self._error is None else self._error + sample

    @property
    def error_sample(self) -> tuple[float, float]:
        """Sum of the samples' squared relative errors, and their number; reads the device."""
        if self._error is None:
            return 0.0, 0.0
        error, samples = self._error.tolist()
        return error, samples

    def numbers(self) -> list[float]:
        """All figures as numbers; reads device tensors, so call it only when reporting."""
        nonfinite = 0.0 if self._nonfinite is None else float(self._nonfinite)
        error, samples = self.error_sample
        counts = (self.seen, self.small, self.by_policy, self.compressed, self.raw, self.wire)
        return [*map(float, counts), nonfinite, error, samples, float(self.largest)]


@dataclass(frozen=True, kw_only=True)
class FlowTotal:
    """Counts of one flow summed over ranks (``largest`` is the maximum); see :class:`FlowCount`."""

    flow: Flow
    seen: int
    small: int
    by_policy: int
    compressed: int
    raw: int
    wire: int
    nonfinite_blocks: int
    error: float | None
    largest: int

    @property
    def ratio(self) -> float | None:
        """Wire bytes over raw bytes, or None when nothing was sent."""
        return self.wire / self.raw if self.raw else None

    @property
    def sent(self) -> str:
        """How the calls went: compressed, or plain and why; with their numbers if mixed."""
        plain = self.seen - self.compressed - self.small - self.by_policy
        kinds = {
            "compressed": self.compressed,
            "plain by policy": self.by_policy,
            "plain: small": self.small,
            "plain": plain,  # the role is off, or the step is one before start_step
        }
        happened = {kind: calls for kind, calls in kinds.items() if calls}
        if len(happened) < 2:
            return "".join(happened)
        return ", ".join(f"{calls:,} {kind}" for kind, calls in happened.items())


class Counters:
    """The counts of every flow of one rank.

    Args:
        flows: all flows that can happen in this run, in the order of the report.  It must be the
            same on every rank, since counts are combined by position.
    """

    def __init__(self, flows: Iterable[Flow]) -> None:
        self.flows = tuple(flows)
        self._counts = {flow: FlowCount() for flow in self.flows}

    def __getitem__(self, flow: Flow) -> FlowCount:
        return self._counts[flow]

    def vector(self) -> list[float]:
        """All numbers of all flows, in order, for a reduction over ranks."""
        return [number for flow in self.flows for number in self._counts[flow].numbers()]

    @staticmethod
    def width() -> int:
        """How many numbers :meth:`vector` holds for each flow."""
        return len(FlowCount().numbers())

    def totals(self, summed: list[float], largest: list[float]) -> list[FlowTotal]:
        """Totals from vectors that were reduced over ranks.

        Args:
            summed: :meth:`vector` summed over ranks.
            largest: :meth:`vector` with the maximum over ranks.
        """
        width = self.width()
        totals = []
        for index, flow in enumerate(self.flows):
            numbers = summed[index * width : (index + 1) * width]
            seen, small, by_policy, compressed, raw, wire, nonfinite = map(int, numbers[:7])
            error, samples = numbers[7:9]
            totals.append(
                FlowTotal(
                    flow=flow,
                    seen=seen,
                    small=small,
                    by_policy=by_policy,
                    compressed=compressed,
                    raw=raw,
                    wire=wire,
                    nonfinite_blocks=nonfinite,
                    error=(error / samples) ** 0.5 if samples else None,
                    largest=int(largest[index * width + 9]),
                )
            )
        return totals
