"""Decode: payloads to rows of values (``Taco.decode_rows``), one read and one write."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    PORTABLE,
    clamp_exponent,
    floor_exponent,
    power_of_two,
    quotient,
)
from megatron_taco.kernels.codes import load_codes, values_of
from megatron_taco.kernels.tiles import (
    access_offsets,
    block_index,
    load_scale,
    store_values,
)
from megatron_taco.kernels.transform import hadamard

# With alpha within 2^-60 .. 2^60 and s at least 2^-60 and 2^-60 alpha, or 0, nothing in
# ``quotient`` leaves the normal range: a nonzero element is at least 2^-35 s before division.
EXTREME = tl.constexpr(2.0**60)


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
    FAST: tl.constexpr,
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
    """Decode G blocks of one row.

    Arguments as in encode.py. ``ALIGNED`` says whether scales lie at multiples of their size,
    ``ACCESS`` how INT6 is read (codes.py), ``FAST`` whether ``quotient`` is accurate enough for
    the dtype of ``out``; ``LOG_LIMIT`` is floor(log2 T).
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
    scale = load_scale(scale_base, first, count, G, SCALES == "merged_bf16", ALIGNED)
    q = values_of(a, b, c, FORMAT, ACCESS, MODE)
    if SCALES == "dual":
        second_base = scale_base + 4 * count.to(tl.int64)
        alpha = load_scale(second_base, first, count, G, False, ALIGNED)
        alpha = tl.where(valid, alpha, 1.0)
        x = q * scale
    else:
        e = clamp_exponent(floor_exponent(scale) + LOG_LIMIT)
        x = q * (scale * power_of_two(-e))
    if ROTATE:
        x = hadamard(x) * BLOCK**-0.5
    if SCALES != "dual":
        x = x * power_of_two(e)
    elif FAST and MODE != PORTABLE:
        easy = (alpha <= EXTREME) & (alpha * EXTREME >= 1.0)
        easy &= ~((scale > 0) & (scale * EXTREME < tl.maximum(alpha, 1.0)))
        if tl.min(tl.ravel(easy.to(tl.int32)), 0) == 1:
            inverse = tl.div_rn(tl.full(alpha.shape, 1.0, tl.float32), alpha)
            x = quotient(x, alpha, inverse)
        else:
            # In FP64 the quotient is exact enough to be rounded once more, also to subnormals.
            d = alpha.to(tl.float64)
            x = quotient(x.to(tl.float64), d, 1.0 / d).to(tl.float32)
    else:
        x = tl.div_rn(x, tl.broadcast_to(alpha, x.shape))
    target = out + row * out_units * OUT_UNIT + first * BLOCK
    elements = access_offsets(BLOCK, L, G, J)[:, :, :, None]
    elements += tl.arange(0, V)[None, None, None, :]
    if WHOLE:
        store_values(target, elements, x, valid, MODE)
    elif (first + G) * BLOCK <= numel:
        store_values(target, elements, x, elements >= 0, MODE)
    else:
        store_values(target, elements, x, elements < numel - first * BLOCK, MODE)
