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
from megatron_taco.kernels.codes import store_codes
from megatron_taco.kernels.tiles import round_to_bfloat16, store_scale
from megatron_taco.kernels.transform import block_peak, block_sum, hadamard

# Blocks with divisors below this are multiplied by 2^64, so that ``quotient`` is exact.
TINY = tl.constexpr(2.0**-60)
LIFT = tl.constexpr(2.0**64)


@triton.jit
def emit(
    z,
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
    MODE: tl.constexpr,
):
    """Scale, rotate if asked to, quantise and store z * 2^e.

    Args:
        z: FP32 [L, G, J, V].
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
        MODE: As in arithmetic.py.
    """
    L: tl.constexpr = z.shape[0]
    G: tl.constexpr = z.shape[1]
    BLOCK: tl.constexpr = L * z.shape[2] * z.shape[3]
    BF16: tl.constexpr = SCALES == "merged_bf16"
    NORM: tl.constexpr = 1.0 if not ROTATE else BLOCK**-0.5
    # 1/8 and 1/16 are exact, and no nonzero peak is so small that they could make it subnormal:
    # then the peak is normalised, and the divisor instead of each element.
    LATE: tl.constexpr = BLOCK == 64 or BLOCK == 256
    if SCALES == "dual":
        alpha = adaptive_scale(block_sum(z * z) * (1.0 / BLOCK), TARGET)
        z = z * alpha
    if ROTATE:
        z = hadamard(z)
        if not LATE:
            z = z * NORM
    peak = block_peak(z)
    if ROTATE and LATE:
        peak = peak * NORM
    scale = tl.div_rn(peak, tl.full(peak.shape, LIMIT, tl.float32))
    divisor = scale
    if SCALES != "dual":
        scale = scale * power_of_two(e)
        if BF16:
            scale = round_to_bfloat16(scale)
        divisor = scale * power_of_two(-e)
    finite = is_finite(scale)
    usable = finite & (scale > 0)
    divisor = tl.where(usable, divisor, 1.0)
    if MODE == PORTABLE:
        if ROTATE and LATE:
            z = z * NORM
        q = tl.div_rn(z, tl.broadcast_to(divisor, z.shape))
    else:
        if SUMMED:
            lift = tl.where(divisor < TINY, LIFT, 1.0)
            divisor = divisor * lift
            z = z * lift
        if ROTATE and LATE:
            divisor = divisor * BLOCK**0.5
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        q = quotient(z, divisor, inverse)
    CLAMP: tl.constexpr = SUMMED or SCALES != "dual"
    store_codes(payload, where, valid, q, usable, FORMAT, LIMIT, CLAMP, MODE)
    first = valid & (tl.arange(0, L)[:, None, None, None] == 0)
    spread = tl.broadcast_to(index, (L, G, 1, 1))
    store_scale(scale_base, spread, first, scale, finite, BF16)
    if SCALES == "dual":
        alpha = tl.where(finite, alpha * power_of_two(-e), 1.0)
        store_scale(scale_base + 4 * count, spread, first, alpha, alpha == alpha, False)
