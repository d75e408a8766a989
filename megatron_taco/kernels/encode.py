"""Encode: rows of values to payloads (``Taco.encode_rows``), one read and one write."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    MAX_ADAPTIVE_SCALE,
    any_of,
    clamp_exponent,
    floor_exponent,
    power_of_two,
)
from megatron_taco.kernels.emit import emit, measured
from megatron_taco.kernels.tiles import (
    access_offsets,
    block_index,
    load_pairs,
    load_values,
    unpack_pairs,
)
from megatron_taco.kernels.transform import block_peak


@triton.jit(
    do_not_specialize=[
        "key_low", "key_high", "first_row", "numel", "count", "x_units", "payload_units",
    ]
)  # fmt: skip
def encode_kernel(
    x,
    payloads,
    key_low,
    key_high,
    first_row,
    numel,
    count,
    x_units,
    payload_units,
    X_UNIT: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
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
    """Encode G blocks of one row; the grid is [tiles, rows].

    Args:
        x: FP32, BF16 or FP16; rows are ``x_units`` * ``X_UNIT`` elements apart.
        payloads: uint8; rows are ``payload_units`` * ``PAYLOAD_UNIT`` bytes apart.
        key_low: With ``key_high`` the key of random rounding, words of 32 bits.
        key_high: See ``key_low``.
        first_row: Number of the first row among those that are encoded with the key.
        numel: Elements of a row, in ``count`` blocks.
        count: See ``numel``.
        x_units: See ``x``.
        payload_units: See ``payloads``.
        X_UNIT: Constant, so that the compiler knows how rows are aligned.
        PAYLOAD_UNIT: Likewise.
        WHOLE: Whether ``numel`` is a multiple of ``BLOCK``.
        PAIRS: Whether ``x`` is BF16, ``WHOLE``, with rows at multiples of four bytes.
        STORE: ``ACCESS`` of ``store_codes``.
        SCALES_ALIGNED: Whether scales lie at multiples of their size.
        FORMAT: Name of the code format, ``BITS`` its bits, ``LIMIT`` its T, ``TARGET`` its M,
            ``LOG_LIMIT`` floor(log2 T), ``OFFSET`` as in settings.py.
        BITS: See ``FORMAT``.
        LIMIT: See ``FORMAT``.
        TARGET: See ``FORMAT``.
        LOG_LIMIT: See ``FORMAT``.
        OFFSET: See ``FORMAT``.
        SCALES: ``dual``, ``merged_fp32`` or ``merged_bf16``.
        ORDER: Elements that are transformed together; 1 for none.
        BLOCK: Elements of a block.
        L: Threads of a block, see transform.py.
        G: Blocks of a tile.
        V: Elements of an access of a thread.
        RANDOM: Whether to round integers by the key.
        MODE: As in arithmetic.py.
    """
    first = tl.program_id(0).to(tl.int64) * G
    row = tl.program_id(1).to(tl.int64)
    index = first + block_index(G)
    valid = index < count
    J: tl.constexpr = BLOCK // (L * V)
    source = x + row * x_units * X_UNIT + first * BLOCK
    e = tl.zeros((L, G, 1, 1), tl.int32)
    bound = 1.0 * MAX_ADAPTIVE_SCALE
    if PAIRS:
        # Where all blocks are within 2^-32 .. 2^17, or zero, pre-scaling would change no bit of
        # BF16 numbers, their sums and squares but those of exponents; max |y| is between max |x|
        # and ORDER times that.
        # Blocks beyond the last read the last instead: no masks, and they are not written.
        over = tl.maximum(index - (count - 1), 0)
        pairs = access_offsets(BLOCK // 2, L, G, J)[:, :, :, None] - over * (BLOCK // 2)
        values = unpack_pairs(load_pairs(source, pairs, V))
        mean, y, peak = measured(values, SCALES, ORDER, True)
        plain = (peak == 0) | ((peak >= 2.0**-31 * ORDER) & (peak <= 2.0**16))
        if any_of(~plain):
            values = unpack_pairs(load_pairs(source, pairs, V))
            e = clamp_exponent(floor_exponent(block_peak(values)))
            mean, y, peak = measured(values * power_of_two(-e), SCALES, ORDER, True)
        else:
            bound = bound * 2.0**32
    else:
        elements = access_offsets(BLOCK, L, G, J)[:, :, :, None]
        elements += tl.arange(0, V)[None, None, None, :]
        if WHOLE:
            values = load_values(source, elements, valid, MODE)
        elif (first + G) * BLOCK <= numel:
            values = load_values(source, elements, elements >= 0, MODE)
        else:
            values = load_values(source, elements, elements < numel - first * BLOCK, MODE)
        e = clamp_exponent(floor_exponent(block_peak(values)))
        mean, y, peak = measured(values * power_of_two(-e), SCALES, ORDER, False)
    CODES: tl.constexpr = BLOCK * BITS // 8
    target = payloads + row * payload_units * PAYLOAD_UNIT
    emit(
        mean,
        y,
        peak,
        e,
        bound,
        target + first * CODES,
        access_offsets(CODES, L, G, J),
        target + count.to(tl.int64) * CODES,
        index,
        count.to(tl.int64),
        valid,
        key_low,
        key_high,
        (first_row + row) * count + first,
        STORE,
        SCALES_ALIGNED,
        FORMAT,
        BITS,
        LIMIT,
        TARGET,
        SCALES,
        ORDER,
        False,
        RANDOM,
        MODE,
    )
