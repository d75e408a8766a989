"""What every pipeline boundary offers, cut between two stages or in place.

A boundary sits after a given layer whatever the pipeline size. Cut, the sender runs ``encode`` as
the last operation of its stage and ``pack`` on the result; the receiver runs ``unpack`` and, as
its stage's first operation, ``decode``. Backward, the receiver packs the gradient of what it
unpacked with ``pack_gradient``, and the sender passes ``unpack_gradient``'s result to autograd.
Not cut, ``forward`` does all of it with the same numbers:

    cut:       encode -> pack -> [message] -> unpack -> decode
               backward of encode <- unpack_gradient <- [message] <- pack_gradient
    in place:  encode -> cross (straight-through; the gradient is quantised too) -> decode
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_taco.boundaries.projector import ENDS, Projector
from megatron_taco.boundaries.quantizers import Quantizer, is_plain
from megatron_taco.boundaries.rvq import ResidualVQ
from megatron_taco.boundaries.spel import StepReport


@dataclass(frozen=True)
class Place:
    """Where a boundary is and what of it lives in this process.

    Attributes:
        index: Number of the boundary, from 1; it lies between segments index - 1 and index.
        ends: both (not cut), sender or receiver.
        seed: Of the run.

    Raises:
        ValueError: If a field is out of range.
    """

    index: int
    ends: str = "both"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.index < 1:
            raise ValueError(f"boundary: index is {self.index}, allowed is 1 or more")
        if self.ends not in ENDS:
            raise ValueError(f"boundary: ends is {self.ends!r}, allowed are {', '.join(ENDS)}")


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, there: Quantizer, back: Quantizer, learn: bool) -> Tensor:
        ctx.back = back
        arrived = there.cross(z, learn)
        return arrived.view_as(arrived) if arrived is z else arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back.cross(gradient, False), None, None, None


class Boundary(nn.Module, ABC):
    """A boundary for activations [s, b, d]; FP32, BF16 or FP16.

    Its ordinary parameters (none for most kinds) are trained by the model's optimiser. A projector
    is not among them: see ``Projector``.

    Args:
        place: Where it is.
        hidden: Size of the activations d.
        width: Coordinates of a token on the wire, before quantisation.
        there: Quantiser of the activations.
        back: Quantiser of their gradients; it must not learn.

    Attributes:
        kind: What the configuration calls it.
        projector: The projector, None for kinds that have none.
    """

    kind: ClassVar[str]
    projector: Projector | None

    def __init__(
        self, place: Place, hidden: int, width: int, there: Quantizer, back: Quantizer
    ) -> None:
        super().__init__()
        if isinstance(back, ResidualVQ):
            raise ValueError(f"boundary {place.index}: gradients cannot be quantised by rvq")
        self.place, self.hidden, self.width = place, hidden, width
        self.there, self.back = there, back
        self.projector = None

    @property
    def needs_ids(self) -> bool:
        """Whether ``encode`` and ``decode`` use the token ids; otherwise they may be None."""
        return False

    @property
    def learning(self) -> bool:
        """Whether a quantiser learns from what crosses now: in training, with gradients recorded.

        So that cut and in place a boundary learns from the same passes, once a micro-batch.
        """
        return self.training and torch.is_grad_enabled()

    @abstractmethod
    def encode(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """Return what is to cross: [s, b, width] of x's dtype, differentiable in ``x``.

        Args:
            x: [s, b, d].
            ids: Token ids int64 [b, s] of exactly these positions (a rank's own slice of the
                sequence under sequence or context parallelism), or None.
        """

    @abstractmethod
    def decode(self, z: Tensor, ids: Tensor | None) -> Tensor:
        """Return the next stage's input [s, b, d] from what crossed, differentiable in ``z``."""

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Pass the boundary in place: [s, b, d] to [s, b, d]."""
        return self.decode(self.cross(self.encode(x, ids)), ids)

    def cross(self, z: Tensor) -> Tensor:
        """Return what would arrive of ``z``; backward, what would arrive of its gradient.

        A quantiser learns from it while ``learning``: once for each micro-batch, with or without
        recomputation.
        """
        if is_plain(self.there) and is_plain(self.back):
            return z
        crossed: Tensor = _StraightThrough.apply(z, self.there, self.back, self.learning)
        return crossed

    def wire_shape(self, s: int, b: int) -> tuple[int, int, int]:
        """Return the shape of ``encode``'s result for ``s`` positions of ``b`` sequences."""
        return (s, b, self.width)

    def wire_bytes(self, s: int, b: int, dtype: torch.dtype, backward: bool = False) -> int:
        """Return the size of a message now, for compute dtype ``dtype``.

        It depends on whether it is ``learning``, and on the step while a codebook warms up; both
        ends have the same of each.
        """
        if backward:
            return self.back.message_bytes(self.wire_shape(s, b), dtype, False)
        return self.there.message_bytes(self.wire_shape(s, b), dtype, self.learning)

    def pack(self, z: Tensor) -> Tensor:
        """Return the message of ``encode``'s result: uint8 [wire_bytes]; once a micro-batch.

        Without a quantiser it shares memory with ``z``.
        """
        return self.there.pack(z, self.learning)

    def unpack(self, message: Tensor, s: int, b: int, dtype: torch.dtype) -> Tensor:
        """Return what arrived, a new tensor of ``wire_shape(s, b)``; once a micro-batch, in order.

        To be called with gradients recorded as they are in the pass: see ``learning``.

        Raises:
            ValueError: If the message has another size than ``wire_bytes``.
        """
        return self.there.unpack(message, self.wire_shape(s, b), dtype, self.learning)

    def pack_gradient(self, gradient: Tensor) -> Tensor:
        """Return the message of the gradient of what was unpacked: uint8."""
        return self.back.pack(gradient, False)

    def unpack_gradient(self, message: Tensor, s: int, b: int, dtype: torch.dtype) -> Tensor:
        """Return the gradient for ``encode``'s result, a new tensor of ``wire_shape(s, b)``.

        Raises:
            ValueError: If the message has another size than ``wire_bytes(backward=True)``.
        """
        return self.back.unpack(message, self.wire_shape(s, b), dtype, False)

    def error_pair(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return what this boundary codes and what of it arrives, for a measure of its error.

        Changes nothing, and needs the sending half alone: anchors are in neither.

        Args:
            x: What enters, [s, b, d].
            ids: Token ids, as for ``encode``.

        Returns:
            Two tensors of one shape; None where nothing is lost, or the sender cannot tell what.
        """
        return None

    def gradient_error_pair(self, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a gradient [s, b, width] and what of it arrives; None where all of it does."""
        if is_plain(self.back):
            return None
        return gradient, self.back.cross(gradient, False)

    def gradient_parts(self) -> dict[str, Tensor]:
        """Return the parts of the projector's gradient that arose here: see ``Projector``."""
        return {} if self.projector is None else self.projector.gradient_parts()

    def statistics(self, replica: int = 0, replicas: int = 1) -> Tensor | None:
        """Return what has to be summed over the replicas before ``end_step``, FP32, or None."""
        if isinstance(self.there, ResidualVQ):
            return self.there.codebook.statistics(replica, replicas)
        return None

    def begin_step(self) -> None:
        """Drop what a step accumulated so far, where its passes are to be run again."""
        if self.projector is not None:
            self.projector.zero_gradients()
        if isinstance(self.there, ResidualVQ):
            self.there.codebook.discard()

    def end_step(
        self,
        gradient: Tensor | None = None,
        lr: float = 0.0,
        statistics: Tensor | None = None,
        skipped: bool = False,
    ) -> StepReport | None:
        """End an optimiser step, on both ends with the same arguments.

        Args:
            gradient: The projector's whole gradient, FP32 [d, r]; needed where it is learned.
            lr: Its step length.
            statistics: What ``statistics`` returned, summed over the replicas.
            skipped: Whether the optimiser skipped this step: gradient and statistics are dropped.

        Returns:
            What the projector's update did, None if there was none.

        Raises:
            ValueError: If the gradient or the statistics are missing.
            FloatingPointError: If the projector is not finite afterwards.
        """
        report = None
        if self.projector is not None:
            if skipped:
                self.projector.zero_gradients()
            elif self.projector.update != "none":
                if gradient is None:
                    raise ValueError(f"boundary {self.place.index}: the projector has no gradient")
                report = self.projector.step(gradient, lr)
        if isinstance(self.there, ResidualVQ):
            self.there.codebook.end_step(statistics, skipped)
        return report

    def shared_state(self) -> dict[str, Tensor]:
        """Return what both ends hold and must agree on, bit for bit, after every step."""
        state: dict[str, Tensor] = {}
        if self.projector is not None:
            state["projector"] = self.projector.a
            if self.projector.momentum is not None:
                state["momentum"] = self.projector.momentum
        if isinstance(self.there, ResidualVQ):
            state["codebook"] = self.there.codebook.table
        return state
