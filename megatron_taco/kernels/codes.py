"""Codes of a tile: FP32 quotients to packed bytes in memory, and back (formats.py).

``where`` is [L, G, J]: the byte at which the codes of an access of V elements start. MODE is one of
arithmetic.py's.
"""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import FP8_CONVERSIONS, PORTABLE
from megatron_taco.kernels.float8 import from_float8, to_float8

# Adding 1.5 * 2^23 rounds |q| < 2^22 to an integer, ties to even, and leaves it in the low bits.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _split_last(x):
    """Split the last axis of a 4-D tensor into even and odd elements."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    D: tl.constexpr = x.shape[3]
    return tl.split(tl.reshape(x, (A, B, C, D // 2, 2)))


@triton.jit
def _interleave_last(a, b):
    """Undo ``_split_last``."""
    A: tl.constexpr = a.shape[0]
    B: tl.constexpr = a.shape[1]
    C: tl.constexpr = a.shape[2]
    D: tl.constexpr = a.shape[3]
    return tl.reshape(tl.join(a, b), (A, B, C, D * 2))


@triton.jit
def _low_bytes(words, mask, MODE: tl.constexpr):
    """Return the low byte of each int32 of ``words`` & ``mask``: uint8."""
    if MODE == PORTABLE:
        return (words & mask).to(tl.uint8)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, m, n;
        prmt.b32 a, $1, $2, 0x0040;
        prmt.b32 b, $3, $4, 0x0040;
        prmt.b32 a, a, b, 0x5410;
        prmt.b32 m, $5, $6, 0x0040;
        prmt.b32 n, $7, $8, 0x0040;
        prmt.b32 m, m, n, 0x5410;
        and.b32 $0, a, m; }""",
        "=r,r,r,r,r,r,r,r,r",
        [words, tl.broadcast_to(mask, words.shape)],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _float8_bytes(q, mask, E5M2: tl.constexpr):
    """Convert FP32 to FP8 bytes, saturating, & ``mask`` by the conversion instruction: uint8."""
    if E5M2:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .b32 c, m, n;
            cvt.rn.satfinite.e5m2x2.f32 a, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 b, $4, $3;
            mov.b32 c, {a, b};
            prmt.b32 m, $5, $6, 0x0040;
            prmt.b32 n, $7, $8, 0x0040;
            prmt.b32 m, m, n, 0x5410;
            and.b32 $0, c, m; }""",
            "=r,f,f,f,f,r,r,r,r",
            [q, tl.broadcast_to(mask, q.shape)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        """{ .reg .b16 a, b; .reg .b32 c, m, n;
        cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
        mov.b32 c, {a, b};
        prmt.b32 m, $5, $6, 0x0040;
        prmt.b32 n, $7, $8, 0x0040;
        prmt.b32 m, m, n, 0x5410;
        and.b32 $0, c, m; }""",
        "=r,f,f,f,f,r,r,r,r",
        [q, tl.broadcast_to(mask, q.shape)],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _clamp(q, LIMIT: tl.constexpr):
    return tl.minimum(tl.maximum(q, -LIMIT), LIMIT)


@triton.jit
def store_codes(
    base,
    where,
    valid,
    q,
    usable,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMP: tl.constexpr,
    MODE: tl.constexpr,
):
    """Round FP32 ``q`` [L, G, J, V], saturate, pack and store; codes are 0 where not ``usable``.

    Args:
        base: Address of the tile's first code, uint8.
        where: Bytes from there [L, G, J], a multiple of two for V = 8.
        valid: Whether to store [L, G, 1, 1].
        q: Quotients y / s.
        usable: Blocks whose codes count [L, G, 1, 1].
        FORMAT: Name of the format.
        LIMIT: T, the largest code.
        CLAMP: Whether |q| can round to more than T; integers only.
        MODE: As in the module's docstring.
    """
    V: tl.constexpr = q.shape[3]
    mask = tl.where(usable, -1, 0)
    places = base + where[:, :, :, None]
    if FORMAT == "e4m3" or FORMAT == "e5m2":
        E5M2: tl.constexpr = FORMAT == "e5m2"
        if MODE == FP8_CONVERSIONS:
            bytes_ = _float8_bytes(q, mask, E5M2)
        else:
            codes = to_float8(_clamp(q, LIMIT), 2 if E5M2 else 3, 15 if E5M2 else 7)
            bytes_ = _low_bytes(codes, mask, MODE)
        tl.store(places + tl.arange(0, V)[None, None, None, :], bytes_, mask=valid)
    else:
        if CLAMP:
            q = _clamp(q, LIMIT)
        codes = (q + ROUNDER).to(tl.int32, bitcast=True)
        if FORMAT == "int8":
            bytes_ = _low_bytes(codes, mask, MODE)
            tl.store(places + tl.arange(0, V)[None, None, None, :], bytes_, mask=valid)
        elif FORMAT == "int4":
            even, odd = _split_last(codes)
            bytes_ = _low_bytes((even & 0xF) | (odd << 4), mask, MODE)
            tl.store(places + tl.arange(0, V // 2)[None, None, None, :], bytes_, mask=valid)
        else:
            even, odd = _split_last((codes & 0x3F) & mask)
            even, odd = _split_last(even | (odd << 6))
            words = even | (odd << 12)  # four codes in 24 bits: [L, G, J, V / 4]
            if V == 8:
                first, second = _split_last(words)
                places = places.to(tl.pointer_type(tl.uint16))
                tl.store(places, first.to(tl.uint16), mask=valid)
                tl.store(places + 1, ((first >> 16) | (second << 8)).to(tl.uint16), mask=valid)
                tl.store(places + 2, (second >> 8).to(tl.uint16), mask=valid)
            else:
                tl.store(places, words.to(tl.uint8), mask=valid)
                tl.store(places + 1, (words >> 8).to(tl.uint8), mask=valid)
                tl.store(places + 2, (words >> 16).to(tl.uint8), mask=valid)


@triton.jit
def load_codes(
    base,
    where,
    valid,
    V: tl.constexpr,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Load the codes of a tile and return their values, exact: FP32 [L, G, J, V].

    Args:
        base: Address of the tile's first code, uint8.
        where: Bytes from there [L, G, J].
        valid: Whether to load [L, G, 1, 1]; 0 elsewhere.
        V: Elements of an access.
        FORMAT: Name of the format.
        PAIRS: Whether ``base`` is a multiple of two and V is 8; INT6 only.
        MODE: As in the module's docstring.
    """
    places = base + where[:, :, :, None]
    if FORMAT == "int6":
        if PAIRS:
            halves = places.to(tl.pointer_type(tl.uint16))
            a = tl.load(halves, mask=valid, other=0).to(tl.int32)
            b = tl.load(halves + 1, mask=valid, other=0).to(tl.int32)
            c = tl.load(halves + 2, mask=valid, other=0).to(tl.int32)
            words = _interleave_last(a | ((b & 0xFF) << 16), (b >> 8) | (c << 8))
        else:
            words = places + 3 * tl.arange(0, V // 4)[None, None, None, :]
            a = tl.load(words, mask=valid, other=0).to(tl.int32)
            b = tl.load(words + 1, mask=valid, other=0).to(tl.int32)
            c = tl.load(words + 2, mask=valid, other=0).to(tl.int32)
            words = a | (b << 8) | (c << 16)
        words = _interleave_last(words << 20, words << 8)  # pairs of codes in the top 12 bits
        return (_interleave_last(words << 6, words) >> 26).to(tl.float32)
    if FORMAT == "int4":
        pairs = places + tl.arange(0, V // 2)[None, None, None, :]
        words = tl.load(pairs, mask=valid, other=0).to(tl.int32)
        return (_interleave_last(words << 28, words << 24) >> 28).to(tl.float32)
    bytes_ = tl.load(places + tl.arange(0, V)[None, None, None, :], mask=valid, other=0)
    if FORMAT == "int8":
        return bytes_.to(tl.int8, bitcast=True).to(tl.float32)
    if FORMAT == "e4m3":
        if MODE == FP8_CONVERSIONS:
            return bytes_.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return from_float8(bytes_, 3, 7)
    if MODE == FP8_CONVERSIONS:
        return bytes_.to(tl.float8e5, bitcast=True).to(tl.float32)
    return from_float8(bytes_, 2, 15)
