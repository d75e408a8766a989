"""How a projector moves: SPEL on the Stiefel manifold, and Muon without it.

SPEL (arXiv 2601.21487, as used by MAPL; papers.md 2.2), for the Euclidean gradient g:

    g_R = g - A sym(A'g)                 tangent projection
    m   = beta m + (1 - beta) g_R        momentum of the Riemannian gradient
    D   = msign(m)                       steepest direction of the spectral norm
    A   = polar factor of (A - lr D)     retraction

Both are functions of their arguments alone, so that the two ends of a boundary, given equal bits,
end with equal bits and A itself is never sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_taco.boundaries.stiefel import (
    LARGEST_STEP,
    msign,
    orthonormalise,
    orthonormality_error,
    retract,
    tangent,
)

DRIFT = 1e-4
"""Orthonormality error of the FP32 master above which it is repaired."""


@dataclass(frozen=True)
class StepReport:
    """What one update did.

    Attributes:
        orthonormality: max |A'A - I| after the update, before any repair.
        repaired: Whether it was beyond ``DRIFT`` and A was orthonormalised again.
        moved: Root mean square sine of the angles between the old and the new subspace
            (exact for orthonormal columns, an estimate without the manifold).
    """

    orthonormality: float
    repaired: bool
    moved: float


def spel_step(
    a: Tensor, momentum: Tensor, gradient: Tensor, lr: float, beta: float = 0.95
) -> tuple[Tensor, Tensor, StepReport]:
    """Make one SPEL step; nothing is changed in place.

    Args:
        a: FP32 or FP64 [d, r] with orthonormal columns.
        momentum: [d, r], zeros at first.
        gradient: Euclidean gradient of the loss [d, r], both ends' parts added; its scale does not
            matter, but has to be the same in all steps. Finite: the caller skips other steps.
        lr: Step length, absolute (2e-3 is the published one), at most 0.25.
        beta: Momentum.

    Returns:
        The new A, the new momentum and a report. One synchronisation with the device.

    Raises:
        ValueError: If ``lr`` is out of range, or a shape or dtype is not that of ``a``.
        FloatingPointError: If the new A is not finite.
    """
    _check(a, momentum, gradient)
    if not 0.0 <= lr <= LARGEST_STEP:
        raise ValueError(f"spel: lr is {lr}, allowed is 0 .. {LARGEST_STEP}")
    momentum = beta * momentum + (1.0 - beta) * tangent(a, gradient)
    moved_a = retract(a - lr * msign(momentum))
    error, moved = _measure(a, moved_a)
    repaired = error > DRIFT
    if repaired:
        moved_a = orthonormalise(moved_a)
    return moved_a, momentum, StepReport(error, repaired, moved)


def muon_step(
    a: Tensor, momentum: Tensor, gradient: Tensor, lr: float, beta: float = 0.95
) -> tuple[Tensor, Tensor, StepReport]:
    """Make one Muon step with Nesterov momentum, no constraint: A - lr sqrt(max(1, d / r)) D.

    Arguments, results and errors are those of ``spel_step``, but for the limit on ``lr``; A is
    never repaired.
    """
    _check(a, momentum, gradient)
    if lr < 0.0:
        raise ValueError(f"muon: lr is {lr}, allowed is 0 or more")
    momentum = beta * momentum + (1.0 - beta) * gradient
    direction = msign(beta * momentum + (1.0 - beta) * gradient)
    moved_a = a - lr * max(1.0, a.shape[0] / a.shape[1]) ** 0.5 * direction
    error, moved = _measure(a, moved_a)
    return moved_a, momentum, StepReport(error, False, moved)


def _check(a: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    for name, tensor in (("momentum", momentum), ("gradient", gradient)):
        if tensor.shape != a.shape or tensor.dtype != a.dtype:
            raise ValueError(
                f"{name} of a projector is {tensor.dtype}{list(tensor.shape)}, "
                f"expected {a.dtype}{list(a.shape)}"
            )


def _measure(old: Tensor, new: Tensor) -> tuple[float, float]:
    outside = new - old @ (old.t() @ new)
    moved = torch.linalg.vector_norm(outside) / new.shape[1] ** 0.5
    error, distance = torch.stack([orthonormality_error(new), moved]).tolist()
    if error != error or error == float("inf"):
        raise FloatingPointError("a projector is not finite after its update")
    return error, distance
