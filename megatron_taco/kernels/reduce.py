"""Sums of payloads in the rotated domain: encoded again, or with one inverse transform."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    MAX_ADAPTIVE_SCALE,
    clamp_exponent,
    power_of_two,
)
from megatron_taco.kernels.codes import load_codes, values_of
from megatron_taco.kernels.emit import emit, measured
from megatron_taco.kernels.scales import load_scales, relative_scale, scale_exponent
from megatron_taco.kernels.tiles import (
    access_offsets,
    block_index,
    interleave_last,
    split_last,
    store_values,
)
from megatron_taco.kernels.transform import hadamard

# More payloads than this are summed in a loop: their codes would need too many registers.
UNROLLED = tl.constexpr(8)


@triton.jit
def _byte_of(payloads, at, rank, stride, PEERS: tl.constexpr):
    """Return the address of the same byte of each payload.

    ``at`` is that of the first payload, with ``stride`` bytes from one to the next. With ``PEERS``
    it is the byte's number, and ``payloads`` a table of where they start, int64, all multiples of
    16.
    """
    if PEERS:
        base = tl.load(payloads + rank).to(tl.pointer_type(tl.uint8))
        found = tl.multiple_of(base, 16) + at
    else:
        found = at + rank * stride
    return found


@triton.jit
def rotated_sum(
    payloads,
    count,
    payload_units,
    first,
    PEERS: tl.constexpr,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
):
    """Return z, FP32 [L, G, J, V], and e, int32 [1, G, 1, 1]: the sum, rotated, is z * 2^e.

    Products are exact (scales.py), so a fused multiply-add is a product and a sum.

    ``first`` is the tile's first block, ``PEERS`` as in ``_byte_of``; other arguments as in
    encode.py and decode.py.
    """
    stride = payload_units.to(tl.int64) * PAYLOAD_UNIT
    valid = first + block_index(G) < count
    CODES: tl.constexpr = BLOCK * BITS // 8
    if PEERS:
        codes = first * CODES
        scale_base = count * CODES
    else:
        codes = payloads + first * CODES
        scale_base = payloads + count * CODES
    offsets = access_offsets(CODES, L, G, BLOCK // (L * V))
    if RANKS <= UNROLLED:
        # All loads first: what is in flight at a time decides the speed.
        raw = ()
        scales = ()
        for rank in tl.static_range(RANKS):
            base = _byte_of(payloads, codes, rank, stride, PEERS)
            raw += (load_codes(base, offsets, valid, V, FORMAT, ACCESS),)
        for rank in tl.static_range(RANKS):
            base = _byte_of(payloads, scale_base, rank, stride, PEERS)
            scales += (load_scales(base, first, count, G, SCALES, ALIGNED),)
        e = scale_exponent(scales[0][0], scales[0][1], SCALES)
        for rank in tl.static_range(1, RANKS):
            e = tl.maximum(e, scale_exponent(scales[rank][0], scales[rank][1], SCALES))
        e = clamp_exponent(e + LOG_LIMIT)
        relative = ()
        for rank in tl.static_range(RANKS):
            relative += (relative_scale(scales[rank][0], scales[rank][1], e, SCALES, MODE),)
        z = values_of(raw[0][0], raw[0][1], raw[0][2], OFFSET, FORMAT, ACCESS, MODE)
        if OFFSET:
            total = relative[0]
            for rank in tl.static_range(1, RANKS):
                total += relative[rank]
            start = tl.broadcast_to(total * -OFFSET, z.shape)
            z = tl.fma(z, tl.broadcast_to(relative[0], z.shape), start)
        else:
            z = z * relative[0]
        for rank in tl.static_range(1, RANKS):
            q = values_of(raw[rank][0], raw[rank][1], raw[rank][2], OFFSET, FORMAT, ACCESS, MODE)
            z = tl.fma(q, tl.broadcast_to(relative[rank], q.shape), z)
    else:
        e = tl.full((1, G, 1, 1), -1000, tl.int32)
        for rank in tl.range(0, RANKS):
            base = _byte_of(payloads, scale_base, rank, stride, PEERS)
            s, alpha = load_scales(base, first, count, G, SCALES, ALIGNED)
            e = tl.maximum(e, scale_exponent(s, alpha, SCALES))
        e = clamp_exponent(e + LOG_LIMIT)
        # -0 + x is x, also for x = -0; tl.full would make -0.0 a +0.
        total = tl.full((1, G, 1, 1), -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        if OFFSET:
            for rank in tl.range(0, RANKS):
                base = _byte_of(payloads, scale_base, rank, stride, PEERS)
                s, alpha = load_scales(base, first, count, G, SCALES, ALIGNED)
                total += relative_scale(s, alpha, e, SCALES, MODE)
            total = total * -OFFSET
        z = tl.broadcast_to(total, (L, G, BLOCK // (L * V), V))
        for rank in tl.range(0, RANKS):
            base = _byte_of(payloads, scale_base, rank, stride, PEERS)
            s, alpha = load_scales(base, first, count, G, SCALES, ALIGNED)
            base = _byte_of(payloads, codes, rank, stride, PEERS)
            a, b, c = load_codes(base, offsets, valid, V, FORMAT, ACCESS)
            relative = relative_scale(s, alpha, e, SCALES, MODE)
            q = values_of(a, b, c, OFFSET, FORMAT, ACCESS, MODE)
            z = tl.fma(q, tl.broadcast_to(relative, q.shape), z)
    even, odd = split_last(z)
    z = interleave_last(even, odd)
    return z, e


@triton.jit(do_not_specialize=["key_low", "key_high", "count", "payload_units"])
def reduce_encode_kernel(
    payloads,
    out,
    key_low,
    key_high,
    count,
    payload_units,
    PEERS: tl.constexpr,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
    STORE: tl.constexpr,
    SCALES_ALIGNED: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TARGET: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    RANDOM: tl.constexpr,
    MODE: tl.constexpr,
):
    """Sum G blocks of ``RANKS`` payloads and encode the sum (``Taco.reduce_encode``).

    Arguments as in encode.py, decode.py and ``rotated_sum``; ``out`` is one payload.
    """
    first = tl.program_id(0).to(tl.int64) * G
    count = count.to(tl.int64)
    z, e = rotated_sum(
        payloads,
        count,
        payload_units,
        first,
        PEERS,
        RANKS,
        PAYLOAD_UNIT,
        ALIGNED,
        ACCESS,
        FORMAT,
        BITS,
        LOG_LIMIT,
        OFFSET,
        SCALES,
        BLOCK,
        L,
        G,
        V,
        MODE,
    )
    index = first + block_index(G)
    CODES: tl.constexpr = BLOCK * BITS // 8
    mean, y, peak = measured(z, SCALES, 1, False)
    emit(
        mean,
        y,
        peak,
        e,
        1.0 * MAX_ADAPTIVE_SCALE,
        out + first * CODES,
        access_offsets(CODES, L, G, BLOCK // (L * V)),
        out + count * CODES,
        index,
        count,
        index < count,
        key_low,
        key_high,
        first,
        STORE,
        SCALES_ALIGNED,
        FORMAT,
        BITS,
        LIMIT,
        TARGET,
        SCALES,
        1,
        True,
        RANDOM,
        MODE,
    )


@triton.jit(do_not_specialize=["numel", "count", "payload_units"])
def decode_sum_kernel(
    payloads,
    out,
    numel,
    count,
    payload_units,
    PEERS: tl.constexpr,
    RANKS: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
    WHOLE: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TARGET: tl.constexpr,
    LOG_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
):
    """Sum G blocks of ``RANKS`` payloads to values (``Taco.decode_sum``).

    Arguments as in encode.py, decode.py and ``rotated_sum``.
    """
    first = tl.program_id(0).to(tl.int64) * G
    x, e = rotated_sum(
        payloads,
        count.to(tl.int64),
        payload_units,
        first,
        PEERS,
        RANKS,
        PAYLOAD_UNIT,
        ALIGNED,
        ACCESS,
        FORMAT,
        BITS,
        LOG_LIMIT,
        OFFSET,
        SCALES,
        BLOCK,
        L,
        G,
        V,
        MODE,
    )
    NORM: tl.constexpr = ORDER**-0.5
    if ORDER > 1:
        x = hadamard(x, ORDER)
    x = x * (power_of_two(e) * NORM)
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
