"""The projector of one boundary: FP32 master, momentum, gradient accumulators and its update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_taco.boundaries.spel import StepReport, muon_step, spel_step
from megatron_taco.boundaries.state import FixedPrecision
from megatron_taco.boundaries.stiefel import haar, orthonormality_error, principal_angles

ENDS = ("both", "sender", "receiver")
"""Which halves of a boundary a process holds: both where the boundary is not cut."""

_Step = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor, StepReport]]
UPDATES: dict[str, _Step | None] = {"spel": spel_step, "muon": muon_step, "none": None}


class Projector(FixedPrecision):
    """A [d, r] and all that moves it. Buffers, not parameters: DDP and the optimiser never see it.

    Both ends of a cut boundary hold one, equal in every bit. Each accumulates its own part of the
    gradient; the caller reduces the parts over replicas, exchanges them, adds them and calls
    ``step`` with the same sum at both ends.

    Args:
        hidden: Rows d.
        rank: Columns r.
        seed: Of the run.
        boundary: Number of the boundary, which also picks the initial A.
        update: ``spel``, ``muon`` (no manifold) or ``none`` (A stays as it is, no gradient kept).
        ends: Which parts of the gradient arise here: both, sender or receiver.
        beta: Momentum.

    Attributes:
        a: Master, FP32 [d, r].
        momentum: FP32 [d, r], absent for ``none``.
        sender_gradient: FP32 [d, r] or None, sum over the micro-batches since the last step.
        receiver_gradient: Likewise for the receiving half.
        steps: Updates made.
        repairs: Updates after which A had to be orthonormalised.
    """

    a: Tensor
    momentum: Tensor | None
    sender_gradient: Tensor | None
    receiver_gradient: Tensor | None

    def __init__(
        self,
        hidden: int,
        rank: int,
        seed: int,
        boundary: int,
        update: str = "spel",
        ends: str = "both",
        beta: float = 0.95,
    ) -> None:
        super().__init__()
        if update not in UPDATES:
            raise ValueError(f"projector: update is {update!r}, allowed are {', '.join(UPDATES)}")
        if ends not in ENDS:
            raise ValueError(f"projector: ends is {ends!r}, allowed are {', '.join(ENDS)}")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"projector: beta is {beta}, allowed is 0 <= beta < 1")
        self.seed, self.boundary = seed, boundary
        self.update, self.ends, self.beta = update, ends, beta
        self.steps, self.repairs = 0, 0
        self._start: Tensor | None = None
        self.register_buffer("a", haar(hidden, rank, seed, boundary))
        learned = update != "none"
        self.register_buffer("momentum", torch.zeros_like(self.a) if learned else None)
        for end in ("sender", "receiver"):
            held = learned and ends in ("both", end)
            zeros = torch.zeros(hidden, rank) if held else None
            self.register_buffer(f"{end}_gradient", zeros, persistent=False)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return A in the compute dtype: what both ends multiply with, in both directions."""
        return self.a.to(dtype)

    def orthonormality(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return max |A'A - I| of the master, or of its copy in ``dtype``, 0-dim on the device."""
        return orthonormality_error(self.rounded(dtype).to(self.a.dtype))

    def angles_moved(self) -> Tensor:
        """Return the principal angles between the initial subspace and this one: FP64 [r], radians.

        Ascending; for A with orthonormal columns. The initial A is drawn once more at the first
        call and kept on the host, FP32 [d, r].
        """
        if self._start is None:
            self._start = haar(self.a.shape[0], self.a.shape[1], self.seed, self.boundary)
        return principal_angles(self._start.to(self.a.device), self.a)

    def gradient_parts(self) -> dict[str, Tensor]:
        """Return the accumulators held here, by end: FP32 [d, r], to be reduced in place."""
        parts = {"sender": self.sender_gradient, "receiver": self.receiver_gradient}
        return {end: part for end, part in parts.items() if part is not None}

    def zero_gradients(self) -> None:
        """Set the accumulators to zero, as ``step`` does and a skipped step must."""
        for part in self.gradient_parts().values():
            part.zero_()

    def step(self, gradient: Tensor, lr: float) -> StepReport | None:
        """Update A from the whole gradient and clear the accumulators.

        Args:
            gradient: Sender's plus receiver's part, reduced and unscaled, FP32 [d, r], finite.
            lr: Step length.

        Returns:
            What was done; None if this projector does not move.

        Raises:
            ValueError: If ``lr`` or ``gradient`` is not what the update takes.
            FloatingPointError: If A is not finite afterwards; the message names the boundary.
        """
        move = UPDATES[self.update]
        if move is None or self.momentum is None:
            return None
        try:
            a, momentum, report = move(self.a, self.momentum, gradient, lr, self.beta)
        except FloatingPointError as error:
            raise FloatingPointError(f"boundary {self.boundary}: {error}") from None
        self.a.copy_(a)
        self.momentum.copy_(momentum)
        self.steps += 1
        self.repairs += report.repaired
        self.zero_gradients()
        return report

    def get_extra_state(self) -> dict[str, int]:
        """Return the counters for ``state_dict``."""
        return {"steps": self.steps, "repairs": self.repairs}

    def set_extra_state(self, state: Any) -> None:
        """Take the counters of a ``state_dict``."""
        self.steps, self.repairs = int(state["steps"]), int(state["repairs"])
