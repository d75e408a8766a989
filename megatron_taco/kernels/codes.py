"""Codes of a tile: FP32 quotients to packed bytes in memory, and back (formats.py).

``where`` is [L, G, J]: the byte at which the codes of an access of V elements start. MODE is one of
arithmetic.py's.
"""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import FP8_CONVERSIONS, PORTABLE
from megatron_taco.kernels.float8 import from_float8, to_float8
from megatron_taco.kernels.tiles import interleave_last, split_last

# Adding 1.5 * 2^23 rounds |q| < 2^22 to an integer, ties to even, and leaves it in the low bits.
# Numbers of these bits are compared and limited like those that they stand for.
ROUNDER = tl.constexpr(12582912.0)
WIDE_ROUNDER = tl.constexpr(1.5 * 2.0**52)  # the same for FP64


@triton.jit
def _low_bytes(words, MODE: tl.constexpr):
    """Return the low byte of each int32 of ``words``: uint8."""
    if MODE == PORTABLE:
        return words.to(tl.uint8)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b;
        prmt.b32 a, $1, $2, 0x0040;
        prmt.b32 b, $3, $4, 0x0040;
        prmt.b32 $0, a, b, 0x5410; }""",
        "=r,r,r,r,r",
        [words],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _float8_bytes(q, E5M2: tl.constexpr):
    """Convert FP32 to FP8 bytes by the conversion instruction, saturating: uint8."""
    if E5M2:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b;
            cvt.rn.satfinite.e5m2x2.f32 a, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 b, $4, $3;
            mov.b32 $0, {a, b}; }""",
            "=r,f,f,f,f",
            [q],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        """{ .reg .b16 a, b;
        cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
        mov.b32 $0, {a, b}; }""",
        "=r,f,f,f,f",
        [q],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _pack(q, BITS: tl.constexpr):
    """Put codes as ``rounded`` leaves them into words.

    With 2^(BITS - 1) added a code is not negative, so codes can be put side by side by products
    and sums; what ``rounder`` and the additions leave is a constant, and taken off at the end.

    Returns:
        int32 [L, G, J, n]: for six bits words of four codes, 24 bits; for four bits words of
        eight codes, or of four if V is 4.
    """
    V: tl.constexpr = q.shape[3]
    SIGN: tl.constexpr = 1 << (BITS - 1)
    words = q.to(tl.int32, bitcast=True)
    LEVELS: tl.constexpr = 3 if BITS == 4 and V > 4 else 2
    for k in tl.static_range(LEVELS):
        even, odd = split_last(words)
        words = even + odd * (1 << (BITS << k))
    COUNT: tl.constexpr = 1 << LEVELS
    ONES: tl.constexpr = ((1 << (BITS * COUNT)) - 1) // ((1 << BITS) - 1)
    # Both as int32.
    LEFT: tl.constexpr = (0x4B400000 * ONES + 2**31) % 2**32 - 2**31
    SIGNS: tl.constexpr = (SIGN * ONES + 2**31) % 2**32 - 2**31
    return (words - LEFT) ^ SIGNS


@triton.jit
def quantised(y, inverse, START: tl.constexpr, MODE: tl.constexpr):
    """Return y * inverse, FP32, if ``START`` is 0; else that product and ``START`` in one rounding.

    An integer is in the lowest bits then, see ``ROUNDER``. Triton's interpreter rounds the product
    of a fused multiply-add, so there FP64, which holds it, is rounded to an integer first.
    """
    if START == 0:
        q = y * inverse
    elif MODE == PORTABLE:
        exact = y.to(tl.float64) * tl.broadcast_to(inverse, y.shape).to(tl.float64)
        q = ((exact + WIDE_ROUNDER) - WIDE_ROUNDER + START).to(tl.float32)
    else:
        start = tl.full(y.shape, START, tl.float32)
        q = tl.fma(y, tl.broadcast_to(inverse, y.shape), start)
    return q


@triton.jit
def only_usable(q, usable, LIMIT: tl.constexpr, START: tl.constexpr):
    """Return ``quantised`` numbers within ±T of ``START``, and ``START`` where not ``usable``."""
    q = tl.minimum(tl.maximum(q, START - LIMIT), START + LIMIT)
    return tl.where(usable, q, START)


@triton.jit
def store_codes(
    base,
    where,
    valid,
    q,
    ACCESS: tl.constexpr,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    MODE: tl.constexpr,
):
    """Convert FP32 ``q`` [L, G, J, V] to codes, pack and store them.

    Args:
        base: Address of the tile's first code, uint8.
        where: Bytes from there [L, G, J].
        valid: Whether to store [L, G, 1, 1].
        q: As ``quantised`` returns them; FP8 saturates, integers are within ±T.
        ACCESS: Bytes that INT6 and INT4 write at once, ``code_access`` of plan.py, or 1 where
            addresses are not multiples of that.
        FORMAT: Name of the format.
        LIMIT: T, the largest code.
        MODE: As in the module's docstring.
    """
    V: tl.constexpr = q.shape[3]
    places = base + where[:, :, :, None]
    if FORMAT == "e4m3" or FORMAT == "e5m2":
        E5M2: tl.constexpr = FORMAT == "e5m2"
        if MODE == FP8_CONVERSIONS:
            bytes_ = _float8_bytes(q, E5M2)
        else:
            q = tl.minimum(tl.maximum(q, -LIMIT), LIMIT)
            codes = to_float8(q, 2 if E5M2 else 3, 15 if E5M2 else 7)
            bytes_ = _low_bytes(codes, MODE)
        tl.store(places + tl.arange(0, V)[None, None, None, :], bytes_, mask=valid)
    elif FORMAT == "int8":
        bytes_ = _low_bytes(q.to(tl.int32, bitcast=True), MODE)
        tl.store(places + tl.arange(0, V)[None, None, None, :], bytes_, mask=valid)
    elif FORMAT == "int4":
        words = _pack(q, 4)
        if ACCESS == 4:
            k = tl.arange(0, V // 8)[None, None, None, :]
            tl.store(places.to(tl.pointer_type(tl.int32)) + k, words, mask=valid)
        elif ACCESS == 2:
            tl.store(places.to(tl.pointer_type(tl.uint16)), words.to(tl.uint16), mask=valid)
        else:
            SIZE: tl.constexpr = 2 if V == 4 else 4
            _store_bytes(places, words, SIZE, valid)
    else:
        words = _pack(q, 6)  # four codes in 24 bits: [L, G, J, V / 4]
        if ACCESS == 4:
            even, odd = split_last(words)
            a, c = split_last(even)  # words 0 and 2
            b, d = split_last(odd)
            third = (c >> 16) | (d << 8)
            triple = interleave_last(
                interleave_last(a | (b << 24), third),
                interleave_last((b >> 8) | (c << 16), tl.zeros_like(third)),
            )
            k = tl.arange(0, 4)[None, None, None, :]
            tl.store(places.to(tl.pointer_type(tl.int32)) + k, triple, mask=valid & (k < 3))
        elif ACCESS == 2:
            first, second = split_last(words)
            places = places.to(tl.pointer_type(tl.uint16))
            tl.store(places, first.to(tl.uint16), mask=valid)
            tl.store(places + 1, ((first >> 16) | (second << 8)).to(tl.uint16), mask=valid)
            tl.store(places + 2, (second >> 8).to(tl.uint16), mask=valid)
        else:
            _store_bytes(places, words, 3, valid)


@triton.jit
def _store_bytes(places, words, SIZE: tl.constexpr, valid):
    """Store the low ``SIZE`` bytes of each int32 of ``words`` [L, G, J, n] one by one."""
    places += SIZE * tl.arange(0, words.shape[3])[None, None, None, :]
    for k in tl.static_range(SIZE):
        tl.store(places + k, (words >> (8 * k)).to(tl.uint8), mask=valid)


@triton.jit
def load_codes(base, where, valid, V: tl.constexpr, FORMAT: tl.constexpr, ACCESS: tl.constexpr):
    """Load the codes of a tile as they are, for ``values_of``.

    Args:
        base: Address of the tile's first code, uint8.
        where: Bytes from there [L, G, J].
        valid: Whether to load [L, G, 1, 1]; 0 elsewhere.
        V: Elements of an access.
        FORMAT: Name of the format.
        ACCESS: Bytes read at once, for INT6: 4 if V is 16 and addresses are multiples of four, 2
            if V is 8 and they are even, else 1.

    Returns:
        Three tensors, of which only INT6 needs the second and the third.
    """
    places = base + where[:, :, :, None]
    if FORMAT != "int6":
        WIDTH: tl.constexpr = V // 2 if FORMAT == "int4" else V
        a = tl.load(places + tl.arange(0, WIDTH)[None, None, None, :], mask=valid, other=0)
        b = a
        c = a
    else:
        if ACCESS == 4:
            words = places.to(tl.pointer_type(tl.int32))
        elif ACCESS == 2:
            words = places.to(tl.pointer_type(tl.uint16))
        else:
            words = places + 3 * tl.arange(0, V // 4)[None, None, None, :]
        a = tl.load(words, mask=valid, other=0)
        b = tl.load(words + 1, mask=valid, other=0)
        c = tl.load(words + 2, mask=valid, other=0)
    return a, b, c


@triton.jit
def _int6_words(a, b, c, ACCESS: tl.constexpr):
    """Return the 24-bit words of four codes that ``load_codes`` found, in order."""
    a = a.to(tl.int32)
    b = b.to(tl.int32)
    c = c.to(tl.int32)
    if ACCESS == 4:
        low = (a >> 24) & 0xFF
        high = (b >> 16) & 0xFFFF
        words = interleave_last(
            interleave_last(a, high | (c << 16)), interleave_last(low | (b << 8), c >> 8)
        )
    elif ACCESS == 2:
        words = interleave_last(a | ((b & 0xFF) << 16), (b >> 8) | (c << 8))
    else:
        words = a | (b << 8) | (c << 16)
    return words


@triton.jit
def _integers(bits, BITS: tl.constexpr):
    """Return q from the bits of 2^23 + 2^(BITS - 1) + q: exact, and cheaper than a conversion.

    Inverting the sign bit of a two's-complement code adds 2^(BITS - 1); the bits of 2^23 above it
    make it a floating-point number.
    """
    return bits.to(tl.float32, bitcast=True) - (2.0**23 + 2.0 ** (BITS - 1))


# (a & b) ^ c, in one instruction
_UPPER_FIELD = tl.constexpr("lop3.b32 $0, $1, 0x7E0000, 0x42C00000, 0x6A;")
_LOWER_FIELD = tl.constexpr("lop3.b32 $0, $1, 0x3F, 0x4B000020, 0x6A;")


@triton.jit
def _masked(words, MASK: tl.constexpr, FLIP: tl.constexpr, ASM: tl.constexpr, MODE: tl.constexpr):
    """Return (words & ``MASK``) ^ ``FLIP`` of int32, which is what ``ASM`` says as well."""
    if MODE == PORTABLE:
        bits = (words & MASK) ^ FLIP
    else:
        bits = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    return bits


@triton.jit
def _int6_values(words, OFFSET: tl.constexpr, MODE: tl.constexpr):
    """Return the values of int32 words of four codes [L, G, J, V / 4]: FP32 [L, G, J, V].

    With ``OFFSET`` 96 is added to each: inverting the sign bit of a code adds 32; 64 and that,
    shifted, are the upper bits of a floating-point number.
    """
    if OFFSET:
        even = interleave_last(words << 17, words << 5)
        codes = interleave_last(even, interleave_last(words << 11, words >> 1))
        bits = _masked(codes, 0x7E0000, 0x42C00000, _UPPER_FIELD, MODE)
        return bits.to(tl.float32, bitcast=True)
    words = interleave_last(words, words >> 12)
    bits = _masked(interleave_last(words, words >> 6), 0x3F, 0x4B000020, _LOWER_FIELD, MODE)
    return _integers(bits, 6)


@triton.jit
def _int4_values(codes, OFFSET: tl.constexpr, MODE: tl.constexpr):
    """Return the values of pairs of codes in uint8 [L, G, J, V / 2]: FP32 [L, G, J, V]."""
    if OFFSET:
        return _int4_values_and_24(codes, MODE)
    if MODE == PORTABLE:
        words = codes.to(tl.int32)
        even = (words & 0xF) ^ 0x4B000008
        odd = (words >> 4) ^ 0x4B000008
    else:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c;
            lop3.b32 a, $8, 0x0F0F0F0F, 0x08080808, 0x6A;
            shr.u32 b, $8, 4;
            lop3.b32 b, b, 0x0F0F0F0F, 0x08080808, 0x6A;
            mov.b32 c, 0x4B000000;
            prmt.b32 $0, a, c, 0x7440;
            prmt.b32 $1, a, c, 0x7441;
            prmt.b32 $2, a, c, 0x7442;
            prmt.b32 $3, a, c, 0x7443;
            prmt.b32 $4, b, c, 0x7440;
            prmt.b32 $5, b, c, 0x7441;
            prmt.b32 $6, b, c, 0x7442;
            prmt.b32 $7, b, c, 0x7443; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
    return _integers(interleave_last(even, odd), 4)


@triton.jit
def _int4_values_and_24(codes, MODE: tl.constexpr):
    """As ``_int4_values``, and 24 added.

    Inverting the sign bit of a code adds 8; 16 and that, shifted, are the upper bits of a
    floating-point number.
    """
    if MODE == PORTABLE:
        words = codes.to(tl.int32)
        even = ((words & 0xF) << 19) ^ 0x41C00000
        odd = ((words & 0xF0) << 15) ^ 0x41C00000
    else:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c;
            shl.b32 a, $8, 3;
            lop3.b32 a, a, 0x78787878, 0xC0C0C0C0, 0x6A;
            shr.u32 b, $8, 1;
            lop3.b32 b, b, 0x78787878, 0xC0C0C0C0, 0x6A;
            mov.b32 c, 0x41;
            prmt.b32 $0, a, c, 0x4055;
            prmt.b32 $1, a, c, 0x4155;
            prmt.b32 $2, a, c, 0x4255;
            prmt.b32 $3, a, c, 0x4355;
            prmt.b32 $4, b, c, 0x4055;
            prmt.b32 $5, b, c, 0x4155;
            prmt.b32 $6, b, c, 0x4255;
            prmt.b32 $7, b, c, 0x4355; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
    even = even.to(tl.float32, bitcast=True)
    return interleave_last(even, odd.to(tl.float32, bitcast=True))


@triton.jit
def _int8_values(codes, MODE: tl.constexpr):
    """Return the values of uint8 codes: FP32."""
    if MODE == PORTABLE:
        bits = codes.to(tl.int32) ^ 0x4B000080
    else:
        bits = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            xor.b32 a, $4, 0x80808080;
            mov.b32 b, 0x4B000000;
            prmt.b32 $0, a, b, 0x7440;
            prmt.b32 $1, a, b, 0x7441;
            prmt.b32 $2, a, b, 0x7442;
            prmt.b32 $3, a, b, 0x7443; }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    return _integers(bits, 8)


@triton.jit
def values_of(
    a,
    b,
    c,
    OFFSET: tl.constexpr,
    FORMAT: tl.constexpr,
    ACCESS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Return the values of codes as ``load_codes`` returns them, exact: FP32 [L, G, J, V].

    ``OFFSET`` is 0 or, for INT4, 24, for INT6, 96, and added to each.
    """
    if FORMAT == "int6":
        values = _int6_values(_int6_words(a, b, c, ACCESS), OFFSET, MODE)
    elif FORMAT == "int4":
        values = _int4_values(a, OFFSET, MODE)
    elif FORMAT == "int8":
        values = _int8_values(a, MODE)
    elif FORMAT == "e4m3":
        if MODE == FP8_CONVERSIONS:
            values = a.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = from_float8(a, 3, 7)
    else:
        if MODE == FP8_CONVERSIONS:
            values = a.to(tl.float8e5, bitcast=True).to(tl.float32)
        else:
            values = from_float8(a, 2, 15)
    return values
