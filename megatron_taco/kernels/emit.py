"""The second half of encoding, from pre-scaled values to a payload's bytes (taco.py, ``_emit``)."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    PORTABLE,
    adaptive_scale,
    is_finite,
    power_of_two,
    quotient,
)
from megatron_taco.kernels.codes import clamp_to, store_codes
from megatron_taco.kernels.tiles import round_to_bfloat16, store_scale
from megatron_taco.kernels.transform import block_peak, block_sum_of_squares, hadamard

# Sums whose mean square is below this have alpha = 2^20 and are multiplied by 2^64, exactly, so
# that no part of ``quotient`` is subnormal.
TINY_MEAN = tl.constexpr(2.0**-126)
TINY = tl.constexpr(2.0**-60)
LIFT = tl.constexpr(2.0**64)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def any_of(x):
    """Whether any element of an int1 tensor is set: a scalar."""
    return tl.max(tl.ravel(x.to(tl.int32)), 0) != 0


@triton.jit
def emit(
    z,
    left,
    e,
    payload,
    where,
    scale_base,
    index,
    count,
    valid,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    TARGET: tl.constexpr,
    SCALES: tl.constexpr,
    ROTATE: tl.constexpr,
    SUMMED: tl.constexpr,
    FUSE: tl.constexpr,
    MODE: tl.constexpr,
):
    """Scale, rotate if asked to, quantise and store z * 2^(e - left), z * 2^-left pre-scaled.

    Args:
        z: FP32 [L, G, J, V].
        left: int32 [L, G, 1, 1], the part of the pre-scaling that is still to be done; dual
            scales only, 0 otherwise, and |left| <= 16.
        e: int32 [L or 1, G, 1, 1].
        payload: Address of the tile's first code.
        where: Bytes from there, of each access [L, G, J].
        scale_base: Address of the payload's first scale.
        index: Number of each block in the payload, int64 [1, G, 1, 1].
        count: Blocks in the payload.
        valid: Which blocks exist [1, G, 1, 1].
        FORMAT: Name of the code format, ``LIMIT`` its T, ``TARGET`` its M.
        LIMIT: See ``FORMAT``.
        TARGET: See ``FORMAT``.
        SCALES: ``dual``, ``merged_fp32`` or ``merged_bf16``.
        ROTATE: Whether to transform.
        SUMMED: Whether z is a sum, so that cancellation may have left any magnitude.
        FUSE: As in transform.py.
        MODE: As in arithmetic.py.
    """
    L: tl.constexpr = z.shape[0]
    G: tl.constexpr = z.shape[1]
    BLOCK: tl.constexpr = L * z.shape[2] * z.shape[3]
    BF16: tl.constexpr = SCALES == "merged_bf16"
    DUAL: tl.constexpr = SCALES == "dual"
    NORM: tl.constexpr = 1.0 if not ROTATE else BLOCK**-0.5
    # 1/8 and 1/16 are exact, and no nonzero peak is so small that they could make it subnormal:
    # then the peak is normalised, and the divisor instead of each element.
    LATE: tl.constexpr = ROTATE and (BLOCK == 64 or BLOCK == 256)
    lift = tl.full((L, G, 1, 1), 1.0, tl.float32)
    if DUAL:
        total = block_sum_of_squares(z, FUSE)
        mean = total * power_of_two(-2 * left) * (1.0 / BLOCK)
        alpha = adaptive_scale(mean, TARGET)
        if SUMMED:
            lift = tl.where(mean < TINY_MEAN, LIFT, 1.0)
        z = z * (alpha * power_of_two(-left) * lift)
    if ROTATE:
        z = hadamard(z)
        if not LATE:
            z = z * NORM
    peak = block_peak(z)
    if LATE:
        peak = peak * NORM
    if SUMMED or MODE == PORTABLE:
        scale = tl.div_rn(peak * (1.0 / lift), tl.full(peak.shape, LIMIT, tl.float32))
    else:
        scale = quotient(peak, LIMIT, 1.0 / LIMIT)  # exact for each T and all mantissas
    divisor = scale
    if not DUAL:
        scale = scale * power_of_two(e)
        if BF16:
            scale = round_to_bfloat16(scale)
        divisor = scale * power_of_two(-e)
        if SUMMED:
            lift = tl.where(divisor < TINY, LIFT, 1.0)
            z = z * lift
    finite = is_finite(scale)
    usable = finite & (scale > 0)
    divisor = tl.where(usable, divisor, 1.0) * lift
    if LATE:
        divisor = divisor * BLOCK**0.5
    if MODE == PORTABLE:
        q = tl.div_rn(z, tl.broadcast_to(divisor, z.shape))
    else:
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        q = quotient(z, divisor, inverse)
    INTEGER: tl.constexpr = FORMAT != "e4m3" and FORMAT != "e5m2"
    if SUMMED and DUAL and INTEGER:
        # Only a subnormal scale is so inexact that a quotient could round to more than T.
        if any_of(scale < SMALLEST_NORMAL):
            q = clamp_to(q, LIMIT)
    store_codes(payload, where, valid, q, usable, FORMAT, LIMIT, not DUAL, MODE)
    first = valid & (tl.arange(0, L)[:, None, None, None] == 0)
    spread = tl.broadcast_to(index, (L, G, 1, 1))
    store_scale(scale_base, spread, first, scale, finite, BF16)
    if DUAL:
        alpha = tl.where(finite, alpha * power_of_two(-e), 1.0)
        store_scale(scale_base + 4 * count, spread, first, alpha, alpha == alpha, False)
