"""Sums of payloads in the rotated domain: encoded again, or with one inverse transform."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    clamp_exponent,
    floor_exponent,
    power_of_two,
)
from megatron_taco.kernels.codes import load_codes, values_of
from megatron_taco.kernels.emit import emit
from megatron_taco.kernels.tiles import (
    access_offsets,
    block_index,
    interleave_last,
    load_scale,
    split_last,
    store_values,
)
from megatron_taco.kernels.transform import hadamard

# More payloads than this are summed in a loop.
UNROLLED = tl.constexpr(8)


@triton.jit
def _scales(base, first, count, G: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the scales of a tile of one payload: s and alpha, or c and 1."""
    scale = load_scale(base, first, count, G, SCALES == "merged_bf16", ALIGNED)
    if SCALES == "dual":
        return scale, load_scale(base + 4 * count, first, count, G, False, ALIGNED)
    return scale, tl.full(scale.shape, 1.0, tl.float32)


@triton.jit
def _exponent(s, alpha, SCALES: tl.constexpr):
    """Return the floor exponent of s / alpha or c, as scales.py takes it."""
    if SCALES == "dual":
        return floor_exponent(s) - floor_exponent(alpha)
    return floor_exponent(s)


@triton.jit
def _relative(s, alpha, e, first, count, SCALES: tl.constexpr):
    """Return s / alpha * 2^-e or c * 2^-e; alpha is 1 for blocks beyond the last."""
    if SCALES == "dual":
        valid = first + block_index(alpha.shape[1]) < count
        return tl.div_rn(s, tl.where(valid, alpha, 1.0) * power_of_two(e))
    return s * power_of_two(-e)


@triton.jit
def rotated_sum(
    payloads,
    count,
    payload_units,
    first,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
):
    """Return z, FP32 [L, G, J, V], and e, int32 [1, G, 1, 1]: the sum, rotated, is z * 2^e.

    ``first`` is the tile's first block; other arguments as in encode.py and decode.py.
    """
    stride = payload_units.to(tl.int64) * PAYLOAD_UNIT
    valid = first + block_index(G) < count
    CODES: tl.constexpr = BLOCK * BITS // 8
    codes = payloads + first * CODES
    scale_base = payloads + count * CODES
    offsets = access_offsets(CODES, L, G, BLOCK // (L * V))
    if RANKS <= UNROLLED:
        # All loads first: what is in flight at a time decides the speed.
        raw = ()
        scales = ()
        for rank in tl.static_range(RANKS):
            raw += (load_codes(codes + rank * stride, offsets, valid, V, FORMAT, ACCESS),)
        for rank in tl.static_range(RANKS):
            scales += (_scales(scale_base + rank * stride, first, count, G, SCALES, ALIGNED),)
        e = _exponent(scales[0][0], scales[0][1], SCALES)
        for rank in tl.static_range(1, RANKS):
            e = tl.maximum(e, _exponent(scales[rank][0], scales[rank][1], SCALES))
        e = clamp_exponent(e + LOG_LIMIT)
        relative = _relative(scales[0][0], scales[0][1], e, first, count, SCALES)
        z = values_of(raw[0][0], raw[0][1], raw[0][2], FORMAT, ACCESS, MODE) * relative
        for rank in tl.static_range(1, RANKS):
            relative = _relative(scales[rank][0], scales[rank][1], e, first, count, SCALES)
            q = values_of(raw[rank][0], raw[rank][1], raw[rank][2], FORMAT, ACCESS, MODE)
            z += q * relative
    else:
        e = tl.full((1, G, 1, 1), -1000, tl.int32)
        for rank in tl.range(0, RANKS):
            s, alpha = _scales(scale_base + rank * stride, first, count, G, SCALES, ALIGNED)
            e = tl.maximum(e, _exponent(s, alpha, SCALES))
        e = clamp_exponent(e + LOG_LIMIT)
        # -0 + x is x, also for x = -0; tl.full would make -0.0 a +0.
        zero = tl.full((L, G, BLOCK // (L * V), V), -0x80000000, tl.int32)
        z = zero.to(tl.float32, bitcast=True)
        for rank in tl.range(0, RANKS):
            s, alpha = _scales(scale_base + rank * stride, first, count, G, SCALES, ALIGNED)
            a, b, c = load_codes(codes + rank * stride, offsets, valid, V, FORMAT, ACCESS)
            relative = _relative(s, alpha, e, first, count, SCALES)
            z += values_of(a, b, c, FORMAT, ACCESS, MODE) * relative
    even, odd = split_last(z)
    z = interleave_last(even, odd)
    return z, e


@triton.jit(do_not_specialize=["count", "payload_units"])
def reduce_encode_kernel(
    payloads,
    out,
    count,
    payload_units,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TARGET: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
):
    """Sum G blocks of ``RANKS`` payloads and encode the sum (``Taco.reduce_encode``).

    Arguments as in encode.py and decode.py; ``out`` is one payload.
    """
    first = tl.program_id(0).to(tl.int64) * G
    count = count.to(tl.int64)
    z, e = rotated_sum(
        payloads,
        count,
        payload_units,
        first,
        RANKS,
        PAYLOAD_UNIT,
        ALIGNED,
        ACCESS,
        FORMAT,
        BITS,
        LOG_LIMIT,
        SCALES,
        BLOCK,
        L,
        G,
        V,
        MODE,
    )
    index = first + block_index(G)
    CODES: tl.constexpr = BLOCK * BITS // 8
    emit(
        z,
        tl.zeros_like(e),
        e,
        out + first * CODES,
        access_offsets(CODES, L, G, BLOCK // (L * V)),
        out + count * CODES,
        index,
        count,
        index < count,
        FORMAT,
        LIMIT,
        TARGET,
        SCALES,
        False,
        True,
        False,
        MODE,
    )


@triton.jit(do_not_specialize=["numel", "count", "payload_units"])
def decode_sum_kernel(
    payloads,
    out,
    numel,
    count,
    payload_units,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
    WHOLE: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    SCALES: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
):
    """Sum G blocks of ``RANKS`` payloads to FP32 values (``Taco.decode_sum``).

    Arguments as in encode.py and decode.py.
    """
    first = tl.program_id(0).to(tl.int64) * G
    x, e = rotated_sum(
        payloads,
        count.to(tl.int64),
        payload_units,
        first,
        RANKS,
        PAYLOAD_UNIT,
        ALIGNED,
        ACCESS,
        FORMAT,
        BITS,
        LOG_LIMIT,
        SCALES,
        BLOCK,
        L,
        G,
        V,
        MODE,
    )
    if ROTATE:
        x = hadamard(x) * BLOCK**-0.5
    x = x * power_of_two(e)
    elements = access_offsets(BLOCK, L, G, BLOCK // (L * V))[:, :, :, None]
    elements += tl.arange(0, V)[None, None, None, :]
    valid = first + block_index(G) < count
    target = out + first * BLOCK
    if WHOLE:
        store_values(target, elements, x, valid, MODE)
    elif (first + G) * BLOCK <= numel:
        store_values(target, elements, x, elements >= 0, MODE)
    else:
        store_values(target, elements, x, elements < numel - first * BLOCK, MODE)
