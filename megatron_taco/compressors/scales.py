"""The scales of TACO: what a block's values are divided by, and how that is sent.

All scales of a batch of blocks are FP32 vectors [N] or matrices [R, g]; every division and square
root is correctly rounded. (Torch divides by a Python number on a GPU as a multiplication by the
reciprocal, which is not: hence divisors are tensors here.)
"""

import torch
from torch import Tensor

from megatron_taco.compressors.blocks import (
    clamp_exponent,
    floor_exponent,
    power_of_two,
)
from megatron_taco.compressors.hadamard import sum_of_squares

MAX_ADAPTIVE_SCALE = 2.0**21
# Of a block after pre-scaling: a sum whose scale is below has cancelled to nothing, and a rank
# whose scale is below another's by as much adds nothing.
SMALLEST_SCALE = 2.0**-100
# A block whose exponent is below is decoded at one of 0 and scaled down at the end.
SMALLEST_PLAIN_EXPONENT = -60


def square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of FP32 ``x``: FP32.

    Torch's own FP32 square root on a CPU is one unit off for one value in five of long vectors.
    That of the same value in FP64, rounded, is exact: 53 bits are more than twice 24 and two.
    """
    return x.double().sqrt().float()


def adaptive_scale(z: Tensor, target: float) -> Tensor:
    """Return the first scale of TACO (papers.md 1.2) for pre-scaled columns [B, N]: FP32 [N].

    alpha = M / sqrt(v) with v = mean(z^2), at most 2^21, which only sums that cancel and blocks
    below 2^-100 reach: the paper's lambda and its other clips have no work to do.

    Args:
        z: Columns after pre-scaling; the sum of squares is in ``sum_of_squares``' order, and its
            product with 1/B is exact.
        target: M, the root mean square wanted.
    """
    mean = sum_of_squares(z) * (1.0 / z.shape[0])
    return (torch.full_like(mean, target) / square_root(mean)).clamp(max=MAX_ADAPTIVE_SCALE)


def round_scale(x: Tensor) -> Tensor:
    """Round FP32 ``x`` >= 0 to 17 significant bits, halves up: FP32; a NaN stays one.

    Products of such a scale with codes of 7 bits or fewer are exact in FP32, so a sum of them is
    the same with and without fused multiply-adds.
    """
    bits = (x.view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7FFFFF00)  # a NaN may have a sign
    return ((bits + 0x40) & -0x80).view(torch.float32)


def quant_scale(peak: Tensor, factor: float) -> Tensor:
    """Return the scale that maps a block's largest magnitude to the largest code: FP32 [N].

    Args:
        peak: Largest magnitudes before normalisation, FP32 [N].
        factor: 1 / T, and 1 / sqrt(B) times that where the values are yet to be normalised.
    """
    scale = round_scale(peak * factor)
    return torch.where(scale < SMALLEST_SCALE, 0.0, scale)


def floor_exponents(scale: Tensor, alpha: Tensor | None) -> Tensor:
    """Return the floor exponents of c, or about those of s / alpha: int32, of the same shape."""
    exponents = floor_exponent(scale)
    return exponents if alpha is None else exponents - floor_exponent(alpha)


def common_exponent(exponents: Tensor, limit: float) -> Tensor:
    """Return e [g] for blocks whose scales have the floor exponents [R, g].

    e = max over the rows + floor(log2 T), clamped: then the largest decoded value of any row is
    less than 4 * 2^e, as after pre-scaling.
    """
    return clamp_exponent(exponents.amax(0) + int(limit).bit_length() - 1)


def own_exponent(exponents: Tensor, limit: float) -> Tensor:
    """Return the exponents at which blocks are decoded alone, 0 but for tiny blocks.

    Args:
        exponents: Floor exponents of the blocks' scales, of any shape.
        limit: T.
    """
    e = common_exponent(exponents.unsqueeze(0), limit)
    return torch.where(e < SMALLEST_PLAIN_EXPONENT, e, 0)


def relative_scale(scale: Tensor, alpha: Tensor | None, e: Tensor) -> Tensor:
    """Return c * 2^-e or s / alpha * 2^-e, by ``round_scale``, 0 below 2^-100: FP32 [R, g].

    The ratio is s / (alpha * 2^e), one rounded division: alpha * 2^e is exact, or infinite where
    this rank's block is at least 2^100 times smaller than another's.

    Args:
        scale: c, or s if ``alpha`` is given [R, g].
        alpha: Second scales [R, g].
        e: Exponents [R, g] or [1, g].
    """
    ratio = scale * power_of_two(-e) if alpha is None else scale / (alpha * power_of_two(e))
    ratio = round_scale(ratio)
    return torch.where(ratio < SMALLEST_SCALE, 0.0, ratio)
