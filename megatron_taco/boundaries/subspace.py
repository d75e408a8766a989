"""Subspace Networks (Protocol Models, arXiv 2506.01260): a projection that loses nothing.

One subspace span(U), U in St(d, k), is shared by all boundaries. The model is constrained so that
everything which layers add to the residual stream lies in it:

    W = U U' W     for the output projection of every attention and MLP block, W [d, inputs]
    T = T U U'     for the trainable token embedding, T [V, d]
    x_0 = T[ids] + F[ids]     with F the fixed table of ``StaticAnchor``, known to every stage

so X - F[ids] lies in span(U), and Z = (X - F[ids]) U is exact up to rounding, and so is the
gradient of all that can still move. For Adam to stay in the subspace its second moment must not
vary along d (``level_second_moment_``); the projection is applied after every optimiser step
anyway. What else the model must obey: no learned position embedding at the input (rotary ones do
no harm), no bias outside the subspace, and F added to the embedding (``Chain.anchor``).

U moves every few hundred steps along the Grassmann manifold towards the principal subspace of the
activations' gradients. How far and from which average was not found in the sources: here it is a
step of chosen length along (I - U U') S U, with S the sum of G'G over the receivers' gradients in
the very step that it ends, so that nothing has to be kept from step to step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_taco.boundaries.anchors import StaticAnchor
from megatron_taco.boundaries.boundary import Place
from megatron_taco.boundaries.halves import accumulate_outer_
from megatron_taco.boundaries.projected import Projected
from megatron_taco.boundaries.quantizers import Quantizer
from megatron_taco.boundaries.spel import StepReport
from megatron_taco.boundaries.stiefel import orthonormalise, orthonormality_error

SHARED = 0
"""Number of the projector that all boundaries begin with."""


class _Watch(torch.autograd.Function):
    """The identity, which adds G'(G U) to ``total`` [d, k] on its way back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, u: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        ctx.total = total
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (u,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        accumulate_outer_(ctx.total, rows, rows @ u)
        return gradient, None, None


class Subspace(Projected):
    """The boundary of a Subspace Network.

    Args:
        place: Where it is.
        hidden: Size of the activations d.
        rank: Dimension of the subspace k.
        there: Quantiser of Z.
        back: Quantiser of its gradient.
        anchor: The fixed table F.
        every: Steps between two moves of U; 0 keeps it where it is.
        length: Of a move, see ``move``.

    Attributes:
        pull: S U of this step, FP32 [d, k]; None at a sender, and in steps without a move.
    """

    kind = "subspace"
    update = "none"
    pull: Tensor | None

    def __init__(
        self,
        place: Place,
        hidden: int,
        rank: int,
        there: Quantizer,
        back: Quantizer,
        anchor: StaticAnchor,
        every: int = 0,
        length: float = 0.0,
    ) -> None:
        super().__init__(place, hidden, rank, there, back, anchor, anchor)
        if every < 0 or length < 0.0:
            raise ValueError(
                f"subspace: every is {every} and length {length}, allowed is 0 or more"
            )
        self._every, self._length = every, length
        self.pull = None

    @property
    def subspace(self) -> int:
        """Number of the initial projector: all boundaries share it."""
        return SHARED

    @property
    def due(self) -> bool:
        """Whether U moves at the end of the step that runs."""
        return self._every > 0 and (self.projector.steps + 1) % self._every == 0

    def decode(self, z: Tensor, ids: Tensor | None) -> Tensor:
        """Return X^ [s, b, d] of ``z`` [s, b, k]."""
        x = super().decode(z, ids)
        if not self.due or not torch.is_grad_enabled():
            return x
        if self.pull is None:
            self.pull = torch.zeros(self.hidden, self.width, device=x.device)
        watched: Tensor = _Watch.apply(x, self.projector.rounded(x.dtype), self.pull)
        return watched

    def begin_step(self) -> None:
        """Drop what the step accumulated so far."""
        super().begin_step()
        self.pull = None

    def end_step(
        self,
        gradient: Tensor | None = None,
        lr: float = 0.0,
        statistics: Tensor | None = None,
        skipped: bool = False,
    ) -> StepReport | None:
        """End an optimiser step; where a move is ``due``, ``gradient`` is the sum of all pulls.

        Afterwards all weights have to be constrained, anew after a move.

        Raises:
            ValueError: If a move is due and there is no pull.
        """
        super().end_step(None, lr, statistics, skipped)
        report = None
        if not skipped:
            if self.due:
                if gradient is None:
                    raise ValueError(f"boundary {self.place.index}: the subspace has no pull")
                report = self.move(gradient, self._length)
            self.projector.steps += 1
        self.pull = None
        return report

    def constrain_output_(self, weight: Tensor) -> None:
        """Project an output projection [d, inputs] or a bias [d] on the subspace, in place.

        Raises:
            ValueError: If its first dimension is not d.
        """
        u = self.projector.a
        self._check("an output projection", weight, 0)
        weight.copy_(u @ (u.t() @ weight.detach().to(u.dtype)))

    def constrain_embedding_(self, weight: Tensor) -> None:
        """Project an embedding [V, d] on the subspace, in place.

        Raises:
            ValueError: If its last dimension is not d.
        """
        u = self.projector.a
        self._check("an embedding", weight, -1)
        weight.copy_((weight.detach().to(u.dtype) @ u) @ u.t())

    def level_second_moment_(self, moment: Tensor, along: int) -> None:
        """Replace Adam's second moment by its mean along dimension ``along``, d's, in place.

        Raises:
            ValueError: If that dimension is not d.
        """
        self._check("a second moment", moment, along)
        moment.copy_(moment.mean(along, keepdim=True).expand_as(moment))

    def move(self, pull: Tensor, length: float) -> StepReport:
        """Move U by at most ``length`` radians; afterwards all weights have to be constrained anew.

        Args:
            pull: ``pull`` summed over all boundaries and replicas, FP32 [d, k], finite.
            length: Frobenius norm of the step, at least 0.

        Returns:
            What the move did.

        Raises:
            ValueError: If ``pull`` has another shape, or the length is negative.
        """
        u = self.projector.a
        if pull.shape != u.shape or length < 0.0:
            raise ValueError(
                f"subspace: pull is {list(pull.shape)} and length {length}, "
                f"expected {list(u.shape)} and 0 or more"
            )
        direction = pull - u @ (u.t() @ pull)
        norm = torch.linalg.vector_norm(direction)
        direction = direction / norm.clamp_min(torch.finfo(u.dtype).tiny)
        moved = orthonormalise(u + length * direction)
        outside = torch.linalg.vector_norm(moved - u @ (u.t() @ moved)) / u.shape[1] ** 0.5
        u.copy_(moved)
        error, distance = torch.stack([orthonormality_error(u), outside]).tolist()
        return StepReport(error, False, distance)

    def _check(self, what: str, tensor: Tensor, along: int) -> None:
        if tensor.shape[along] != self.hidden:
            raise ValueError(
                f"subspace: {what} is {list(tensor.shape)}, expected {self.hidden} in dimension "
                f"{along}"
            )
