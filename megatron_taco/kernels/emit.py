"""The second half of encoding, from pre-scaled values to a payload's bytes (taco.py, ``_emit``)."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    adaptive_scale,
    any_of,
    is_finite,
    power_of_two,
    round_scale,
    without_tiny,
)
from megatron_taco.kernels.codes import ROUNDER, only_usable, quantised, store_codes
from megatron_taco.kernels.random import randomly_rounded
from megatron_taco.kernels.tiles import round_to_bfloat16, store_scale
from megatron_taco.kernels.transform import block_peak, block_sum_of_squares, hadamard

SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def measured(z, SCALES: tl.constexpr, ORDER: tl.constexpr, FUSE: tl.constexpr):
    """Return the mean square of each block of z [L, G, J, V] if dual, y and max |y|.

    ``ORDER`` elements are transformed together, ``FUSE`` is as in transform.py.
    """
    BLOCK: tl.constexpr = z.shape[0] * z.shape[2] * z.shape[3]
    y = z
    if ORDER > 1:
        y = hadamard(z, ORDER)
    peak = block_peak(y)
    mean = peak
    if SCALES == "dual":
        mean = block_sum_of_squares(z, FUSE) * (1.0 / BLOCK)
    return mean, y, peak


@triton.jit
def emit(
    mean,
    y,
    peak,
    e,
    bound,
    payload,
    where,
    scale_base,
    index,
    count,
    valid,
    key_low,
    key_high,
    first_number,
    STORE: tl.constexpr,
    SCALES_ALIGNED: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TARGET: tl.constexpr,
    SCALES: tl.constexpr,
    ORDER: tl.constexpr,
    SUMMED: tl.constexpr,
    RANDOM: tl.constexpr,
    MODE: tl.constexpr,
):
    """Scale, quantise and store what ``measured`` returned of z, the values being z * 2^e.

    Args:
        mean: See ``measured``, [L, G, 1, 1].
        y: FP32 [L, G, J, V].
        peak: [L, G, 1, 1].
        e: int32 [L or 1, G, 1, 1].
        bound: The largest alpha, a scalar.
        payload: Address of the tile's first code.
        where: Bytes from there, of each access [L, G, J].
        scale_base: Address of the payload's first scale.
        index: Number of each block in the payload, int64 [1, G, 1, 1].
        count: Blocks in the payload.
        valid: Which blocks exist [1, G, 1, 1].
        key_low: Key of random rounding.
        key_high: See ``key_low``.
        first_number: Number of the tile's first block for random rounding.
        STORE: ``ACCESS`` of ``store_codes``.
        SCALES_ALIGNED: Whether scales lie at multiples of their size.
        FORMAT: Name of the code format, ``BITS`` its bits, ``LIMIT`` its T, ``TARGET`` its M.
        BITS: See ``FORMAT``.
        LIMIT: See ``FORMAT``.
        TARGET: See ``FORMAT``.
        SCALES: ``dual``, ``merged_fp32`` or ``merged_bf16``.
        ORDER: What y is to be divided by the root of.
        SUMMED: Whether z is a sum, so that cancellation may have left any magnitude.
        RANDOM: Whether to round integers by the key.
        MODE: As in arithmetic.py.
    """
    L: tl.constexpr = y.shape[0]
    G: tl.constexpr = y.shape[1]
    BLOCK: tl.constexpr = L * y.shape[2] * y.shape[3]
    BF16: tl.constexpr = SCALES == "merged_bf16"
    DUAL: tl.constexpr = SCALES == "dual"
    NORM: tl.constexpr = ORDER**-0.5
    divisor = round_scale(peak * (NORM / LIMIT))
    if SUMMED:
        divisor = without_tiny(divisor)
    if DUAL:
        alpha = adaptive_scale(mean, TARGET, bound)
        scale = divisor * alpha
    else:
        scale = divisor * power_of_two(e)
        if BF16:
            scale = round_to_bfloat16(scale)
        divisor = scale * power_of_two(-e)
    finite = is_finite(scale)
    usable = finite & (scale > 0)
    inverse = tl.div_rn(tl.full(divisor.shape, NORM, tl.float32), divisor)
    # Where codes are packed the smallest is made 0.
    START: tl.constexpr = ROUNDER + (0 if BITS == 8 else 1 << (BITS - 1))
    FLOATS: tl.constexpr = FORMAT == "e4m3" or FORMAT == "e5m2"
    if RANDOM:
        q = randomly_rounded(y * inverse, key_low, key_high, first_number * BLOCK, LIMIT) + START
    else:
        q = quantised(y, inverse, 0.0 if FLOATS else START, MODE)
    if DUAL:
        unusual = ~usable
    else:  # a subnormal scale may be so inexact that a quotient rounds to more than T
        unusual = ~(finite & (scale >= SMALLEST_NORMAL))
    if any_of(unusual):
        q = only_usable(q, usable, LIMIT, 0.0 if FLOATS else START)
    store_codes(payload, where, valid, q, STORE, FORMAT, LIMIT, MODE)
    first = valid & (tl.arange(0, L)[:, None, None, None] == 0)
    spread = tl.broadcast_to(index, (L, G, 1, 1))
    store_scale(scale_base, spread, first, scale, BF16, SCALES_ALIGNED)
    if DUAL:
        alpha = tl.where(usable, alpha * power_of_two(-e), 1.0)
        store_scale(scale_base + 4 * count, spread, first, alpha, False, SCALES_ALIGNED)
