"""Encode: rows of values to payloads (``Taco.encode_rows``), one read and one write."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import clamp_exponent, floor_exponent, power_of_two
from megatron_taco.kernels.emit import emit
from megatron_taco.kernels.tiles import access_offsets, block_index, load_values
from megatron_taco.kernels.transform import block_peak


@triton.jit(do_not_specialize=["numel", "count", "tiles", "x_units", "payload_units"])
def encode_kernel(
    x,
    payloads,
    numel,
    count,
    tiles,
    x_units,
    payload_units,
    X_UNIT: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
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
    """Encode G blocks of one row; program ids run over ``tiles`` per row, rows outermost.

    Args:
        x: FP32, BF16 or FP16; rows are ``x_units`` * ``X_UNIT`` elements apart.
        payloads: uint8; rows are ``payload_units`` * ``PAYLOAD_UNIT`` bytes apart.
        numel: Elements of a row, in ``count`` blocks, in ``tiles`` tiles.
        count: See ``numel``.
        tiles: See ``numel``.
        x_units: See ``x``.
        payload_units: See ``payloads``.
        X_UNIT: Constant, so that the compiler knows how rows are aligned.
        PAYLOAD_UNIT: Likewise.
        WHOLE: Whether ``numel`` is a multiple of ``BLOCK``.
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
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    first = (program - row * tiles) * G
    index = first + block_index(G)
    valid = index < count
    offsets = access_offsets(BLOCK, L, G, V)
    source = x + row * x_units * X_UNIT + first * BLOCK
    elements = offsets[:, :, :, None] + tl.arange(0, V)[None, None, None, :]
    if WHOLE:
        values = load_values(source, elements, valid, MODE)
    elif (first + G) * BLOCK <= numel:
        values = load_values(source, elements, elements >= 0, MODE)
    else:
        values = load_values(source, elements, elements < numel - first * BLOCK, MODE)
    e = clamp_exponent(floor_exponent(block_peak(values)))
    target = payloads + row * payload_units * PAYLOAD_UNIT
    emit(
        values * power_of_two(-e),
        e,
        target + first * (BLOCK * BITS // 8),
        offsets * BITS // 8,
        target + count.to(tl.int64) * (BLOCK * BITS // 8),
        index,
        count.to(tl.int64),
        valid,
        FORMAT,
        LIMIT,
        TARGET,
        SCALES,
        ROTATE,
        False,
        MODE,
    )
