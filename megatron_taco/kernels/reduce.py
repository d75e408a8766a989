"""Sums of payloads in the rotated domain: encoded again, or with one inverse transform."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import clamp_exponent, floor_exponent, power_of_two
from megatron_taco.kernels.codes import load_codes
from megatron_taco.kernels.emit import emit
from megatron_taco.kernels.tiles import (
    access_offsets,
    block_index,
    load_scale,
    store_values,
)
from megatron_taco.kernels.transform import hadamard


@triton.jit
def _scales(base, first, count, G: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the scales of a tile of one payload: s and alpha, or c and 1."""
    scale = load_scale(base, first, count, G, SCALES == "merged_bf16", ALIGNED)
    if SCALES == "dual":
        return scale, load_scale(base + 4 * count, first, count, G, False, ALIGNED)
    return scale, tl.full(scale.shape, 1.0, tl.float32)


@triton.jit
def rotated_sum(
    payloads,
    count,
    payload_units,
    first,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
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

    ``first`` is the tile's first block; other arguments as in encode.py and decode.py. A loop
    over ranks of more than eight is not unrolled.
    """
    stride = payload_units.to(tl.int64) * PAYLOAD_UNIT
    valid = first + block_index(G) < count
    codes = payloads + first * (BLOCK * BITS // 8)
    scale_base = payloads + count * (BLOCK * BITS // 8)
    offsets = access_offsets(BLOCK, L, G, V) * BITS // 8
    PAIRS: tl.constexpr = PAYLOAD_UNIT % 2 == 0 and V == 8
    e = tl.full((1, G, 1, 1), -1000, tl.int32)
    for rank in tl.range(0, RANKS, loop_unroll_factor=RANKS if RANKS <= 8 else 4):
        s, alpha = _scales(scale_base + rank * stride, first, count, G, SCALES, ALIGNED)
        own = floor_exponent(s)
        if SCALES == "dual":
            own -= floor_exponent(alpha)
        e = tl.maximum(e, own)
    e = clamp_exponent(e + LOG_LIMIT)
    # -0 + x is x, also for x = -0; tl.full would make -0.0 a +0.
    z = tl.full((L, G, BLOCK // (L * V), V), -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    for rank in tl.range(0, RANKS, loop_unroll_factor=RANKS if RANKS <= 8 else 4):
        s, alpha = _scales(scale_base + rank * stride, first, count, G, SCALES, ALIGNED)
        if SCALES == "dual":
            relative = tl.div_rn(s, tl.where(valid, alpha, 1.0) * power_of_two(e))
        else:
            relative = s * power_of_two(-e)
        z += load_codes(codes + rank * stride, offsets, valid, V, FORMAT, PAIRS, MODE) * relative
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
    emit(
        z,
        e,
        out + first * (BLOCK * BITS // 8),
        access_offsets(BLOCK, L, G, V) * BITS // 8,
        out + count * (BLOCK * BITS // 8),
        index,
        count,
        index < count,
        FORMAT,
        LIMIT,
        TARGET,
        SCALES,
        False,
        True,
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
    elements = access_offsets(BLOCK, L, G, V)[:, :, :, None] + tl.arange(0, V)[None, None, None, :]
    valid = first + block_index(G) < count
    target = out + first * BLOCK
    if WHOLE:
        store_values(target, elements, x, valid, MODE)
    elif (first + G) * BLOCK <= numel:
        store_values(target, elements, x, elements >= 0, MODE)
    else:
        store_values(target, elements, x, elements < numel - first * BLOCK, MODE)
