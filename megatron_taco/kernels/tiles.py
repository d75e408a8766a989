"""Where the elements, codes and scales of a tile lie, and how scales are read and written."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import CANONICAL_NAN, PORTABLE, is_finite


@triton.jit
def block_index(G: tl.constexpr):
    """Return the number of each block in the tile, [1, G, 1, 1]."""
    return tl.arange(0, G)[None, :, None, None]


@triton.jit
def access_offsets(SIZE: tl.constexpr, L: tl.constexpr, G: tl.constexpr, J: tl.constexpr):
    """Return where each access of a thread starts in the tile: int64 [L, G, J].

    ``SIZE`` is that of a block, in any unit. In 64 bits the compiler can put the constant parts
    into the instructions.
    """
    lane = tl.arange(0, L).to(tl.int64)[:, None, None] * (SIZE // (L * J))
    block = tl.arange(0, G)[None, :, None] * SIZE
    access = tl.arange(0, J)[None, None, :] * (SIZE // J)
    return block + access + lane


@triton.jit
def split_last(x):
    """Split the last axis of a 4-D tensor into even and odd elements."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    D: tl.constexpr = x.shape[3]
    return tl.split(tl.reshape(x, (A, B, C, D // 2, 2)))


@triton.jit
def interleave_last(a, b):
    """Undo ``split_last``."""
    A: tl.constexpr = a.shape[0]
    B: tl.constexpr = a.shape[1]
    C: tl.constexpr = a.shape[2]
    D: tl.constexpr = a.shape[3]
    return tl.reshape(tl.join(a, b), (A, B, C, D * 2))


@triton.jit
def append_last(a, b):
    """Return ``b`` behind ``a`` along the last axis of 4-D tensors."""
    A: tl.constexpr = a.shape[0]
    B: tl.constexpr = a.shape[1]
    C: tl.constexpr = a.shape[2]
    D: tl.constexpr = a.shape[3]
    return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 2, 4, 3)), (A, B, C, D * 2))


@triton.jit
def load_values(base, elements, mask, MODE: tl.constexpr):
    """Load FP32, BF16 or FP16 values where ``mask`` is set, 0 elsewhere: FP32.

    Triton's interpreter gets subnormal BF16 wrong, so there it sees their bits only.
    """
    if MODE == PORTABLE and base.dtype.element_ty == tl.bfloat16:
        bits = tl.load(base.to(tl.pointer_type(tl.uint16)) + elements, mask=mask, other=0)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.load(base + elements, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_pairs(base, offsets, V: tl.constexpr):
    """Load BF16 values two at a time: int32 [L, G, J, V / 2], the even one in the low half.

    ``offsets`` [L, G, J, 1] are in pairs. V is 8 or 16.
    """
    pairs = base.to(tl.pointer_type(tl.int32)) + offsets + tl.arange(0, 4)[None, None, None, :]
    words = tl.load(pairs)
    if V == 16:  # in two accesses: the compiler would spread one of 32 bytes over two threads
        words = append_last(words, tl.load(pairs + 4))
    return words


@triton.jit
def unpack_pairs(words):
    """Return the values of ``load_pairs``: FP32 [L, G, J, V]."""
    even = (words << 16).to(tl.float32, bitcast=True)
    return interleave_last(even, (words & -0x10000).to(tl.float32, bitcast=True))


@triton.jit
def store_values(base, elements, x, mask, MODE: tl.constexpr):
    """Round FP32 ``x`` to the dtype of ``base`` and store it where ``mask`` is set."""
    if MODE == PORTABLE and base.dtype.element_ty == tl.bfloat16:
        bits = (round_to_bfloat16(x).to(tl.int32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(base.to(tl.pointer_type(tl.uint16)) + elements, bits, mask=mask)
    else:
        tl.store(base + elements, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_vector(base, index, valid, BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the scales number ``index`` of those at ``base``: FP32 [G], see ``load_scale``."""
    if BF16:
        if ALIGNED:
            bits = tl.load(base.to(tl.pointer_type(tl.uint16)) + index, mask=valid, other=0)
            return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        low = tl.load(base + 2 * index, mask=valid, other=0).to(tl.int32)
        high = tl.load(base + 2 * index + 1, mask=valid, other=0).to(tl.int32)
        return ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    if ALIGNED:
        bits = tl.load(base.to(tl.pointer_type(tl.int32)) + index, mask=valid, other=0)
        return bits.to(tl.float32, bitcast=True)
    bits = tl.load(base + 4 * index, mask=valid, other=0).to(tl.int32)
    for k in tl.static_range(1, 4):
        byte = tl.load(base + 4 * index + k, mask=valid, other=0).to(tl.int32)
        bits |= byte << (8 * k)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scale(base, first, count, G: tl.constexpr, BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the scales of a tile's blocks: FP32 [1, G, 1, 1].

    They are loaded as a vector: as a tile they would have a layout of their own, and the compiler
    would move the codes to it.

    Args:
        base: Address of the first scale, uint8.
        first: Number of the first one, int64.
        count: How many there are; 0 is loaded beyond.
        G: Blocks of a tile.
        BF16: Whether a scale is BF16, else FP32.
        ALIGNED: Whether ``base`` is a multiple of a scale's size; else bytes are read one by one.
    """
    index = first + tl.arange(0, G)
    return _load_vector(base, index, index < count, BF16, ALIGNED)[None, :, None, None]


@triton.jit
def round_to_bfloat16(x):
    """Round FP32 to the nearest BF16, ties to even, as FP32; a NaN becomes the canonical one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x != x, CANONICAL_NAN, rounded).to(tl.float32, bitcast=True)


@triton.jit
def store_scale(base, index, valid, scale, BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Store ``scale``; the canonical NaN where it is not finite.

    Args:
        base: Address of the first scale, uint8.
        index: int64 [1, G, 1, 1].
        valid: Whether to store.
        scale: FP32 [L, G, 1, 1], representable in BF16 if ``BF16``.
        BF16: Whether a scale is BF16, else FP32.
        ALIGNED: Whether ``base`` is a multiple of a scale's size; else bytes are written one by
            one.
    """
    bits = tl.where(is_finite(scale), scale.to(tl.int32, bitcast=True), CANONICAL_NAN)
    SIZE: tl.constexpr = 2 if BF16 else 4
    if BF16:
        bits >>= 16
    if not ALIGNED:
        for k in tl.static_range(SIZE):
            tl.store(base + SIZE * index + k, (bits >> (8 * k)).to(tl.uint8), mask=valid)
    elif BF16:
        tl.store(base.to(tl.pointer_type(tl.uint16)) + index, bits.to(tl.uint16), mask=valid)
    else:
        tl.store(base.to(tl.pointer_type(tl.int32)) + index, bits, mask=valid)
