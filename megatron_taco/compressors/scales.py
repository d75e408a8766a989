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

MAX_ADAPTIVE_SCALE = 2.0**20


def square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of FP32 ``x``: FP32.

    Torch's own FP32 square root on a CPU is one unit off for one value in five of long vectors.
    That of the same value in FP64, rounded, is exact: 53 bits are more than twice 24 and two.
    """
    return x.double().sqrt().float()


def adaptive_scale(z: Tensor, target: float) -> Tensor:
    """Return the first scale of TACO (papers.md 1.2) for pre-scaled columns [B, N]: FP32 [N].

    alpha = M / sqrt(v) with v = mean(z^2), at most 2^20. Each z is within a small power of two of
    1, so the paper's lambda and its clips have no work to do: v is 0 only in an all-zero block,
    where alpha is 2^20.

    Args:
        z: Columns after pre-scaling; the sum of squares is in ``sum_of_squares``' order, and its
            product with 1/B is exact.
        target: M, the root mean square wanted.
    """
    mean = sum_of_squares(z) * (1.0 / z.shape[0])
    return (torch.full_like(mean, target) / square_root(mean)).clamp(max=MAX_ADAPTIVE_SCALE)


def quant_scale(peak: Tensor, limit: float) -> Tensor:
    """Return the scale that maps a block's largest magnitude to a code of ``limit``: a / T."""
    return peak / torch.full_like(peak, limit)


def common_exponent(exponents: Tensor, limit: float) -> Tensor:
    """Return e [g] for blocks whose scales have the floor exponents [R, g].

    e = max over the rows + floor(log2 T), clamped: then the largest decoded value of any row is
    less than 4 * 2^e, as after pre-scaling.
    """
    return clamp_exponent(exponents.amax(0) + int(limit).bit_length() - 1)


def merged_relative(scale: Tensor, limit: float, shared: bool) -> tuple[Tensor, Tensor]:
    """Split merged scales c [R, g] into FP32 c * 2^-e [R, g] and exponents e.

    e is [1, g], common to all rows, if ``shared``, else each row has its own: [R, g].
    """
    exponents = floor_exponent(scale)
    if shared:
        e = common_exponent(exponents, limit).unsqueeze(0)
    else:
        e = common_exponent(exponents.unsqueeze(0), limit)
    return scale * power_of_two(-e), e


def dual_relative(s: Tensor, alpha: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Turn dual scales [P, g] into the ratios s / alpha * 2^-e [P, g] and common exponents [1, g].

    The ratio is s / (alpha * 2^e), one rounded division: alpha * 2^e is exact, or infinite where
    this rank's block is at least 2^100 times smaller than another's, which makes the ratio 0.
    """
    e = common_exponent(floor_exponent(s) - floor_exponent(alpha), limit).unsqueeze(0)
    return s / (alpha * power_of_two(e)), e
