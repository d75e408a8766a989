"""Encode: rows of values to payloads (``Taco.encode_rows``), one read and one write."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import clamp_exponent, floor_exponent, power_of_two
from megatron_taco.kernels.emit import any_of, emit
from megatron_taco.kernels.tiles import (
    access_offsets,
    block_index,
    load_pairs,
    load_values,
    unpack_pairs,
)
from megatron_taco.kernels.transform import block_peak, peak_of_pairs


@triton.jit(do_not_specialize=["numel", "count", "x_units", "payload_units"])
def encode_kernel(
    x,
    payloads,
    numel,
    count,
    x_units,
    payload_units,
    X_UNIT: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TARGET: tl.constexpr,
    SCALES: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
):
    """Encode G blocks of one row; the grid is [tiles, rows].

    Args:
        x: FP32, BF16 or FP16; rows are ``x_units`` * ``X_UNIT`` elements apart.
        payloads: uint8; rows are ``payload_units`` * ``PAYLOAD_UNIT`` bytes apart.
        numel: Elements of a row, in ``count`` blocks.
        count: See ``numel``.
        x_units: See ``x``.
        payload_units: See ``payloads``.
        X_UNIT: Constant, so that the compiler knows how rows are aligned.
        PAYLOAD_UNIT: Likewise.
        WHOLE: Whether ``numel`` is a multiple of ``BLOCK``.
        PAIRS: Whether ``x`` is BF16, ``WHOLE``, with rows at multiples of four bytes.
        FORMAT: Name of the code format, ``BITS`` its bits, ``LIMIT`` its T, ``TARGET`` its M.
        BITS: See ``FORMAT``.
        LIMIT: See ``FORMAT``.
        TARGET: See ``FORMAT``.
        SCALES: ``dual``, ``merged_fp32`` or ``merged_bf16``.
        ROTATE: Whether to transform.
        BLOCK: Elements of a block.
        L: Threads of a block, see transform.py.
        G: Blocks of a tile.
        V: Elements of an access of a thread.
        MODE: As in arithmetic.py.
    """
    first = tl.program_id(0).to(tl.int64) * G
    row = tl.program_id(1).to(tl.int64)
    index = first + block_index(G)
    valid = index < count
    J: tl.constexpr = BLOCK // (L * V)
    source = x + row * x_units * X_UNIT + first * BLOCK
    if PAIRS:
        # Blocks beyond the last read the last instead: no masks, and they are not written.
        over = tl.maximum(index - (count - 1), 0)
        pairs = access_offsets(BLOCK // 2, L, G, J)[:, :, :, None] - over * (BLOCK // 2)
        words = load_pairs(source, pairs, V)
        peak = peak_of_pairs(words, MODE)
        values = unpack_pairs(words)
    else:
        elements = access_offsets(BLOCK, L, G, J)[:, :, :, None]
        elements += tl.arange(0, V)[None, None, None, :]
        if WHOLE:
            values = load_values(source, elements, valid, MODE)
        elif (first + G) * BLOCK <= numel:
            values = load_values(source, elements, elements >= 0, MODE)
        else:
            values = load_values(source, elements, elements < numel - first * BLOCK, MODE)
        peak = block_peak(values)
    e = clamp_exponent(floor_exponent(peak))
    left = tl.zeros_like(e)
    if SCALES == "dual" and PAIRS:
        # Where all blocks are within 2^-16 .. 2^17, pre-scaling changes no BF16 number's bits but
        # the exponent's, and is left to the one product with alpha.
        if any_of((e > 16) | ((e < -16) & (peak > 0))):
            values = values * power_of_two(-e)
        else:
            left = tl.where(peak > 0, e, 0)
    else:
        values = values * power_of_two(-e)
    CODES: tl.constexpr = BLOCK * BITS // 8
    target = payloads + row * payload_units * PAYLOAD_UNIT
    emit(
        values,
        left,
        e,
        target + first * CODES,
        access_offsets(CODES, L, G, J),
        target + count.to(tl.int64) * CODES,
        index,
        count.to(tl.int64),
        valid,
        FORMAT,
        LIMIT,
        TARGET,
        SCALES,
        ROTATE,
        False,
        PAIRS,
        MODE,
    )
