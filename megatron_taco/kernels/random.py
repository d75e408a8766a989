"""Random rounding: Philox 4x32-10 by key and number of the element, as ``counter_random.py``."""

import triton
import triton.language as tl

from megatron_taco.kernels.tiles import access_offsets, interleave_last


@triton.jit
def _uniform(word):
    """Return FP32 in [0, 1) of 32 random bits."""
    return (word >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def randomly_rounded(v, key_low, key_high, first, LIMIT: tl.constexpr):
    """Round FP32 ``v`` [L, G, J, V] within ±T up with the probability of its fraction.

    Element i of a row of numbers gets word i % 4 of counter i // 4.

    Args:
        v: What to round; beyond ±T it becomes that.
        key_low: The lower 32 bits of the key, an int32.
        key_high: The upper ones.
        first: Number of the tile's first element, int64, a multiple of four.
        LIMIT: T.
    """
    L: tl.constexpr = v.shape[0]
    G: tl.constexpr = v.shape[1]
    J: tl.constexpr = v.shape[2]
    V: tl.constexpr = v.shape[3]
    quad = access_offsets(L * J * V // 4, L, G, J)[:, :, :, None]
    counter = first // 4 + quad + tl.arange(0, V // 4)[None, None, None, :]
    low = counter.to(tl.uint32)
    zero = tl.zeros_like(low)
    key = (key_high.to(tl.uint32).to(tl.uint64) << 32) | key_low.to(tl.uint32).to(tl.uint64)
    a, b, c, d = tl.philox(key, low, (counter >> 32).to(tl.uint32), zero, zero)
    u = interleave_last(
        interleave_last(_uniform(a), _uniform(c)), interleave_last(_uniform(b), _uniform(d))
    )
    v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
    floor = tl.floor(v)
    return floor + tl.where(u < v - floor, 1.0, 0.0)
