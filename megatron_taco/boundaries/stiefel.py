"""The Stiefel manifold St(d, r) = {A in R^(d x r): A'A = I}: points, tangents, polar factors.

All in the dtype of the arguments, FP32 in training and FP64 in tests. On GPUs the FP32 products
must not be TF32 (torch's default is FP32); the orthonormality error that every step reports would
show it.
"""

import torch
from torch import Tensor

from megatron_taco.boundaries.random import normal, stream_key

# Polar Express: p(x) = a x + b x^3 + c x^5, one triple a step (papers.md 2.5), the last repeated.
_POLAR_EXPRESS = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
    (1.87500, -1.25000, 0.37500),
)
_CUBIC = (1.875, -1.25, 0.375)
_SAFETY = 1.01
RETRACTION_STEPS = 3
LARGEST_STEP = 0.25
"""Up to this step length three Newton-Schulz steps reach the polar factor to FP32 rounding."""


def haar(d: int, r: int, seed: int, boundary: int, purpose: str = "projector") -> Tensor:
    """Return a uniformly distributed point of St(d, r): FP32 [d, r] on the CPU.

    QR of a Gaussian matrix in FP64 with the diagonal of R made positive (Mezzadri 2007).

    Args:
        d: Rows.
        r: Orthonormal columns, 1 <= r <= d.
        seed: Of the run.
        boundary: Number of the boundary, so that each gets its own.
        purpose: Name of the random stream.

    Raises:
        ValueError: If r is out of range.
    """
    if not 1 <= r <= d:
        raise ValueError(f"rank is {r}, allowed is 1 .. {d} (the hidden size)")
    gaussian = normal(stream_key(purpose, seed, boundary, d, r), (d, r))
    return orthonormalise(gaussian).float()


def orthonormalise(a: Tensor) -> Tensor:
    """Return the Q of a's QR decomposition with positive diagonal of R, computed in FP64.

    For columns that are nearly orthonormal it is a repair: it moves each as little as its
    predecessors allow.
    """
    q, upper = torch.linalg.qr(a.double())
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(q)
    return (q * signs).to(a.dtype)


def tangent(a: Tensor, g: Tensor) -> Tensor:
    """Project ``g`` on the tangent space at ``a``: g - a sym(a'g); [d, r].

    The result t satisfies a't + t'a = 0.
    """
    inner = a.t() @ g
    return g - a @ (0.5 * (inner + inner.t()))


def msign(m: Tensor, steps: int = 5) -> Tensor:
    """Return the polar factor of ``m`` [d, r], d >= r, by Polar Express; zeros for zeros.

    Scale-free: ``m`` is divided by its largest magnitude and then by 1.01 times its Frobenius norm.
    5 steps serve for a direction (singular values within some 10% of 1); 8 reach FP32 rounding
    for matrices that are not nearly singular.

    Args:
        m: FP32 or FP64, finite.
        steps: Number of polynomials applied, at least 1.
    """
    tiny = torch.finfo(m.dtype).tiny
    x = m / m.abs().amax().clamp_min(tiny)
    x = x / (torch.linalg.vector_norm(x) * _SAFETY).clamp_min(tiny)
    for step in range(steps):
        if step < len(_POLAR_EXPRESS):
            a, b, c = _POLAR_EXPRESS[step]
            x = _polynomial(x, a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
        else:
            x = _polynomial(x, *_CUBIC)
    return x


def retract(x: Tensor) -> Tensor:
    """Return the polar factor of ``x`` [d, r] whose singular values lie within 0.75 .. 1.25.

    Three Newton-Schulz steps of order five, no normalisation: the error is cubed by each.
    """
    for _ in range(RETRACTION_STEPS):
        x = _polynomial(x, *_CUBIC)
    return x


def orthonormality_error(a: Tensor) -> Tensor:
    """Return max |a'a - I|, 0-dim, on the device of ``a`` [d, r]."""
    gram = a.t() @ a
    gram.diagonal().sub_(1.0)
    return gram.abs().amax()


def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """Return the r angles between the spans of two points of St(d, r), radians, ascending, FP64.

    From sines and cosines, so that small angles keep their digits (Bjorck and Golub 1973), as roots
    of the eigenvalues of r x r matrices: angles below 1e-8, and so near a right angle, are lost.
    """
    a, b = a.double(), b.double()
    inner = a.t() @ b
    outside = b - a @ inner
    sines, cosines = (
        torch.linalg.eigvalsh(each.t() @ each).clamp_min_(0.0).sqrt_() for each in (outside, inner)
    )
    return torch.atan2(sines, cosines.flip(0))


def _polynomial(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """Apply a s + b s^3 + c s^5 to the singular values of ``x`` through its r x r Gram matrix."""
    gram = x.t() @ x
    factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal().add_(a)
    return x @ factor
