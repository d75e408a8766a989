"""Decode: payloads to rows of values (``Taco.decode_rows``), one read and one write."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    PORTABLE,
    SMALLEST_PLAIN_EXPONENT,
    any_of,
    clamp_exponent,
    power_of_two,
)
from megatron_taco.kernels.codes import load_codes, values_of
from megatron_taco.kernels.scales import load_scales, relative_scale, scale_exponent
from megatron_taco.kernels.tiles import access_offsets, block_index, store_values
from megatron_taco.kernels.transform import hadamard


@triton.jit(do_not_specialize=["numel", "count", "out_units", "payload_units"])
def decode_kernel(
    payloads,
    out,
    numel,
    count,
    out_units,
    payload_units,
    OUT_UNIT: tl.constexpr,
    PAYLOAD_UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCESS: tl.constexpr,
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
    """Decode G blocks of one row.

    Arguments as in encode.py. ``ALIGNED`` says whether scales lie at multiples of their size,
    ``ACCESS`` how INT6 is read (codes.py); ``LOG_LIMIT`` is floor(log2 T).
    """
    first = tl.program_id(0).to(tl.int64) * G
    row = tl.program_id(1).to(tl.int64)
    valid = first + block_index(G) < count
    J: tl.constexpr = BLOCK // (L * V)
    CODES: tl.constexpr = BLOCK * BITS // 8
    source = payloads + row * payload_units * PAYLOAD_UNIT
    where = access_offsets(CODES, L, G, J)
    a, b, c = load_codes(source + first * CODES, where, valid, V, FORMAT, ACCESS)
    scale_base = source + count.to(tl.int64) * CODES
    scale, alpha = load_scales(scale_base, first, count.to(tl.int64), G, SCALES, ALIGNED)
    e = clamp_exponent(scale_exponent(scale, alpha, SCALES) + LOG_LIMIT)
    tiny = e < SMALLEST_PLAIN_EXPONENT
    e = tl.where(tiny, e, 0)
    NORM: tl.constexpr = ORDER**-0.5
    x = values_of(a, b, c, 0, FORMAT, ACCESS, MODE)
    if ORDER > 1:
        x = hadamard(x, ORDER)
    x = x * (relative_scale(scale, alpha, e, SCALES, PORTABLE) * NORM)
    if any_of(tiny):
        x = x * power_of_two(e)
    target = out + row * out_units * OUT_UNIT + first * BLOCK
    elements = access_offsets(BLOCK, L, G, J)[:, :, :, None]
    elements += tl.arange(0, V)[None, None, None, :]
    if WHOLE:
        store_values(target, elements, x, valid, MODE)
    elif (first + G) * BLOCK <= numel:
        store_values(target, elements, x, elements >= 0, MODE)
    else:
        store_values(target, elements, x, elements < numel - first * BLOCK, MODE)
