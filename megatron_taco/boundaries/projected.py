"""Boundaries that project: MAPL, and the same with a projector that is fixed or unconstrained."""

from typing import ClassVar

from torch import Tensor

from megatron_taco.boundaries.anchors import Anchor
from megatron_taco.boundaries.boundary import Boundary, Place
from megatron_taco.boundaries.halves import project_down, project_up
from megatron_taco.boundaries.projector import Projector
from megatron_taco.boundaries.quantizers import Quantizer


class Projected(Boundary):
    """Z = (X - anchor) A at the sender, X^ = Z A' + anchor at the receiver (papers.md 2.2).

    Args:
        place: Where it is.
        hidden: Size of the activations d.
        rank: Columns r of A.
        there: Quantiser of Z.
        back: Quantiser of the gradient of Z.
        before: Anchors of the segment before it, None without; used by the sender.
        after: Anchors of the segment after it; used by the receiver.
        beta: Momentum of the projector.

    The anchors are not registered as this module's own: a segment's table serves the boundaries at
    both its ends, so it belongs to the model chunk (``Chain``).
    """

    update: ClassVar[str]
    projector: Projector

    def __init__(
        self,
        place: Place,
        hidden: int,
        rank: int,
        there: Quantizer,
        back: Quantizer,
        before: Anchor | None = None,
        after: Anchor | None = None,
        beta: float = 0.95,
    ) -> None:
        super().__init__(place, hidden, rank, there, back)
        self._anchors = (before, after)
        self.projector = Projector(
            hidden, rank, place.seed, self.subspace, self.update, place.ends, beta
        )

    @property
    def subspace(self) -> int:
        """Number of the initial projector: each boundary its own."""
        return self.place.index

    @property
    def needs_ids(self) -> bool:
        """Whether there are anchors."""
        return any(anchor is not None for anchor in self._anchors)

    def encode(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """Return Z [s, b, r] of ``x`` [s, b, d]."""
        anchor = self._anchor(0, ids, x)
        residual = x if anchor is None else x - anchor
        rounded = self.projector.rounded(x.dtype)
        return project_down(residual, rounded, self.projector.sender_gradient)

    def decode(self, z: Tensor, ids: Tensor | None) -> Tensor:
        """Return X^ [s, b, d] of ``z`` [s, b, r]."""
        rounded = self.projector.rounded(z.dtype)
        y = project_up(z, rounded, self.projector.receiver_gradient)
        anchor = self._anchor(1, ids, z)
        return y if anchor is None else y + anchor

    def error_pair(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the residual R = X - anchor and its projection as it arrives, [s, b, d] each."""
        anchor = self._anchor(0, ids, x)
        residual = x if anchor is None else x - anchor
        rounded = self.projector.rounded(x.dtype)
        arrived = self.there.cross(residual @ rounded, False)
        return residual, arrived @ rounded.t()

    def _anchor(self, side: int, ids: Tensor | None, x: Tensor) -> Tensor | None:
        table = self._anchors[side]
        if table is None:
            return None
        if ids is None or tuple(ids.shape) != (x.shape[1], x.shape[0]):
            found = None if ids is None else list(ids.shape)
            raise ValueError(
                f"boundary {self.place.index}: token ids are {found}, "
                f"expected [{x.shape[1]}, {x.shape[0]}] for activations {list(x.shape)}"
            )
        anchor: Tensor = table(ids, x.dtype)
        return anchor


class Mapl(Projected):
    """A learned on the Stiefel manifold by SPEL."""

    kind = "mapl"
    update = "spel"


class Fixed(Projected):
    """A as drawn: a random orthonormal projector."""

    kind = "fixed"
    update = "none"


class LearnedUnconstrained(Projected):
    """A learned by Muon, from an orthonormal start, with nothing that keeps it orthonormal."""

    kind = "learned_unconstrained"
    update = "muon"
