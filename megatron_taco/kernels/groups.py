"""Kernels of ``BlockInteger``: groups that share a scale, transforms that are shorter than they.

A program holds G whole groups of B elements as a tile [G, B] and leaves their places in registers
to the compiler. The operations and their order are those of ``compressors/block_integer.py``, so
the bytes are, too. Codes have 4 or 8 bits.
"""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    SMALLEST_PLAIN_EXPONENT,
    clamp_exponent,
    floor_exponent,
    is_finite,
    power_of_two,
    round_scale,
    without_tiny,
)
from megatron_taco.kernels.codes import ROUNDER, only_usable, quantised
from megatron_taco.kernels.tiles import (
    load_values,
    round_to_bfloat16,
    store_scale,
    store_values,
)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stage(x, H: tl.constexpr):
    """Butterflies of stride ``H`` within each row of FP32 [G, B]."""
    G: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    y = tl.permute(tl.reshape(x, (G * B // (2 * H), 2, H)), (0, 2, 1))
    a, b = tl.split(y)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (G, B))


@triton.jit
def turned(x, T: tl.constexpr):
    """Return the unnormalised Hadamard transform of each ``T`` elements of FP32 [G, B]."""
    for k in tl.static_range(0, 9):
        if (1 << k) < T:
            x = _stage(x, 1 << k)
    return x


@triton.jit
def uniform(key, first, N: tl.constexpr):
    """Return FP32 [N] in [0, 1) of the elements from number ``first`` on (counter_random.py).

    ``first`` is int64, a multiple of four; ``key`` has 64 bits.
    """
    counter = first // 4 + tl.arange(0, N // 4).to(tl.int64)
    zero = tl.zeros((N // 4,), tl.uint32)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, low, high, zero, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (N,))
    return (words >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _emit(
    y,
    e,
    payload,
    first,
    count,
    number,
    key,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    BF16: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    MODE: tl.constexpr,
):
    """Scale, quantise and store NORM * y * 2^e.

    Args:
        y: FP32 [G, B].
        e: int32 [G].
        payload: Address of the payload.
        first: Number of the tile's first group, int64.
        count: Groups of the payload, int64.
        number: Of the tile's first element, for rounding at random, int64.
        key: Of the same.
        NORM: What the transform is yet to be multiplied by.
        BITS: Of a code.
        LIMIT: The largest code.
        BF16: Whether a scale is BF16, else FP32.
        STOCHASTIC: Whether codes are rounded at random.
        ALIGNED: Whether scales lie at multiples of their size.
        MODE: As in arithmetic.py.
    """
    G: tl.constexpr = y.shape[0]
    B: tl.constexpr = y.shape[1]
    peak = tl.reduce(tl.abs(y), 1, _larger)
    scale = without_tiny(round_scale(peak * (NORM / LIMIT))) * power_of_two(e)
    if BF16:
        scale = round_to_bfloat16(scale)
    finite = is_finite(scale)
    usable = finite & (scale > 0)
    divisor = tl.where(usable, scale * power_of_two(-e), 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, NORM, tl.float32), divisor)[:, None]
    if STOCHASTIC:
        v = tl.where(usable[:, None], y * inverse, 0.0)
        v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
        floor = tl.floor(v)
        u = tl.reshape(uniform(key, number, G * B), (G, B))
        q = floor + tl.where(u < v - floor, 1.0, 0.0) + ROUNDER
    else:
        q = quantised(y, inverse, ROUNDER, MODE)
        q = only_usable(q, usable[:, None], LIMIT, ROUNDER)
    codes = q.to(tl.int32, bitcast=True) & ((1 << BITS) - 1)
    if BITS == 4:
        even, odd = tl.split(tl.reshape(codes, (G, B // 2, 2)))
        codes = even | (odd << 4)
    WIDTH: tl.constexpr = B * BITS // 8
    group = first + tl.arange(0, G)
    valid = group < count
    where = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(payload + where, codes.to(tl.uint8), mask=valid[:, None])
    store_scale(payload + count * WIDTH, group, valid, scale, BF16, ALIGNED)


@triton.jit
def _load_codes(payload, group, valid, BITS: tl.constexpr, B: tl.constexpr):
    """Return the values of the codes of groups int64 [G]: FP32 [G, B], 0 where not ``valid``."""
    WIDTH: tl.constexpr = B * BITS // 8
    where = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    words = tl.load(payload + where, mask=valid[:, None], other=0).to(tl.int32)
    if BITS == 4:
        both = tl.join((words << 28) >> 28, (words << 24) >> 28)
        words = tl.reshape(both, (group.shape[0], B))
    else:
        words = (words << 24) >> 24
    return words.to(tl.float32)


@triton.jit
def _load_scales(base, group, valid, BF16: tl.constexpr):
    """Return the scales of groups int64 [G] from ``base``, of any alignment: FP32 [G]."""
    SIZE: tl.constexpr = 2 if BF16 else 4
    bits = tl.zeros(group.shape, tl.int32)
    for k in tl.static_range(SIZE):
        byte = tl.load(base + SIZE * group + k, mask=valid, other=0).to(tl.int32)
        bits |= byte << (8 * (k + 4 - SIZE))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _relative(scale, e):
    """Return c * 2^-e, of 17 bits, 0 below 2^-100."""
    return without_tiny(round_scale(scale * power_of_two(-e)))


@triton.jit
def _summed(
    payloads,
    stride,
    group,
    count,
    RANKS: tl.constexpr,
    BITS: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BF16: tl.constexpr,
    B: tl.constexpr,
):
    """Return z, FP32 [G, B], and e, int32 [G]: the sum of all payloads, rotated, is z * 2^e."""
    WIDTH: tl.constexpr = B * BITS // 8
    valid = group < count
    e = tl.full(group.shape, -1000, tl.int32)
    for rank in tl.range(0, RANKS):
        scales = payloads + rank * stride + count * WIDTH
        e = tl.maximum(e, floor_exponent(_load_scales(scales, group, valid, BF16)))
    e = clamp_exponent(e + LOG_LIMIT)
    first = _relative(_load_scales(payloads + count * WIDTH, group, valid, BF16), e)
    z = (_load_codes(payloads, group, valid, BITS, B) + OFFSET) * first[:, None]
    if OFFSET:
        total = first
        for rank in tl.range(1, RANKS):
            scales = payloads + rank * stride + count * WIDTH
            total += _relative(_load_scales(scales, group, valid, BF16), e)
        z += (total * -OFFSET)[:, None]
    for rank in tl.range(1, RANKS):
        payload = payloads + rank * stride
        scale = _relative(_load_scales(payload + count * WIDTH, group, valid, BF16), e)
        z += (_load_codes(payload, group, valid, BITS, B) + OFFSET) * scale[:, None]
    return z, e


@triton.jit
def _store(out, first, numel, x, MODE: tl.constexpr):
    """Store values FP32 [G, B] from group ``first`` on, as far as there are elements."""
    G: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    elements = (first + tl.arange(0, G))[:, None] * B + tl.arange(0, B)[None, :]
    store_values(out, elements, x, elements < numel, MODE)


@triton.jit(do_not_specialize=["numel", "count", "x_stride", "out_stride", "key"])
def encode_kernel(
    x,
    out,
    numel,
    count,
    x_stride,
    out_stride,
    key,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    BF16: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    MODE: tl.constexpr,
):
    """Encode G groups of a row of ``x`` (``BlockInteger.encode_rows``)."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * G
    count = count.to(tl.int64)
    elements = (first + tl.arange(0, G))[:, None] * B + tl.arange(0, B)[None, :]
    values = load_values(x + row * x_stride, elements, elements < numel, MODE)
    e = clamp_exponent(floor_exponent(tl.reduce(tl.abs(values), 1, _larger)))
    y = turned(values * power_of_two(-e)[:, None], T)
    payload = out + row * out_stride
    number = (row * count + first) * B
    _emit(
        y, e, payload, first, count, number, key,
        NORM, BITS, LIMIT, BF16, STOCHASTIC, ALIGNED, MODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "count", "payload_stride", "out_stride"])
def decode_kernel(
    payloads,
    out,
    numel,
    count,
    payload_stride,
    out_stride,
    BITS: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    BF16: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    MODE: tl.constexpr,
):
    """Decode G groups of a payload (``BlockInteger.decode_rows``)."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * G
    count = count.to(tl.int64)
    group = first + tl.arange(0, G)
    valid = group < count
    payload = payloads + row * payload_stride
    scale = _load_scales(payload + count * (B * BITS // 8), group, valid, BF16)
    e = clamp_exponent(floor_exponent(scale) + LOG_LIMIT)
    e = tl.where(e < SMALLEST_PLAIN_EXPONENT, e, 0)
    x = turned(_load_codes(payload, group, valid, BITS, B), T)
    x = x * (_relative(scale, e) * NORM)[:, None] * power_of_two(e)[:, None]
    _store(out + row * out_stride, first, numel, x, MODE)


@triton.jit(do_not_specialize=["numel", "count", "stride"])
def decode_sum_kernel(
    payloads,
    out,
    numel,
    count,
    stride,
    RANKS: tl.constexpr,
    BITS: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    BF16: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    MODE: tl.constexpr,
):
    """Sum G groups of all payloads to values (``BlockInteger.decode_sum``)."""
    first = tl.program_id(0).to(tl.int64) * G
    group = first + tl.arange(0, G)
    z, e = _summed(
        payloads, stride.to(tl.int64), group, count.to(tl.int64),
        RANKS, BITS, LOG_LIMIT, OFFSET, BF16, B,
    )  # fmt: skip
    _store(out, first, numel, turned(z, T) * (power_of_two(e) * NORM)[:, None], MODE)


@triton.jit(do_not_specialize=["count", "stride", "key"])
def reduce_encode_kernel(
    payloads,
    out,
    count,
    stride,
    key,
    RANKS: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BF16: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    MODE: tl.constexpr,
):
    """Sum G groups of all payloads and encode the sums (``BlockInteger.reduce_encode``)."""
    first = tl.program_id(0).to(tl.int64) * G
    count = count.to(tl.int64)
    group = first + tl.arange(0, G)
    z, e = _summed(
        payloads, stride.to(tl.int64), group, count, RANKS, BITS, LOG_LIMIT, OFFSET, BF16, B
    )
    _emit(
        z, e, out, first, count, first * B, key,
        1.0, BITS, LIMIT, BF16, STOCHASTIC, ALIGNED, MODE,
    )  # fmt: skip
