"""Hadamard transform and per-block reductions of a tile, in registers and lane exchanges.

A tile holds G blocks of B elements as [L, G, J, V]: element i of a block is at v = i mod V,
l = i // V mod L, j = i // (V L). V elements are one access of a thread, the L threads of a block
lie side by side in memory, their J accesses are L V apart. So a thread holds J V elements of one
block, all else is in the L - 1 threads beside it: butterflies of stride V .. V L / 2 exchange
registers with a neighbour, all others stay in a thread, nothing passes through shared memory.

Values of a block are kept as [L, G, 1, 1], the same in all L threads.

The order of all operations is that of ``compressors/hadamard.py``, so the results are too.
"""

import triton
import triton.language as tl


@triton.jit
def _pairs(x):
    """Butterfly of the last axis, [..., 2]: (a, b) becomes (a + b, a - b)."""
    a, b = tl.split(x)
    return tl.join(a + b, a - b)


@triton.jit
def _neighbour(x, AXIS: tl.constexpr):
    """Return the other element of ``x`` along an axis of two: one exchange between lanes."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.xor_sum(bits, axis=AXIS, keep_dims=True) ^ bits).to(x.dtype, bitcast=True)


@triton.jit
def _stage_in_vector(x, H: tl.constexpr):
    """Butterflies of stride ``H`` < V."""
    L: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    J: tl.constexpr = x.shape[2]
    V: tl.constexpr = x.shape[3]
    y = tl.permute(tl.reshape(x, (L, G, J, V // (2 * H), 2, H)), (0, 1, 2, 3, 5, 4))
    return tl.reshape(tl.permute(_pairs(y), (0, 1, 2, 3, 5, 4)), (L, G, J, V))


@triton.jit
def _stage_between_lanes(x, H: tl.constexpr):
    """Butterflies of stride ``H`` V, ``H`` < L: one side adds, the other subtracts."""
    L: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    J: tl.constexpr = x.shape[2]
    V: tl.constexpr = x.shape[3]
    y = tl.reshape(x, (L // (2 * H), 2, H, G, J, V))
    sign = tl.where(tl.arange(0, 2)[None, :, None, None, None, None] == 0, 1.0, -1.0)
    return tl.reshape(tl.fma(y, sign, _neighbour(y, 1)), (L, G, J, V))


@triton.jit
def _stage_between_accesses(x, H: tl.constexpr):
    """Butterflies of stride ``H`` V L, ``H`` < J."""
    L: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    J: tl.constexpr = x.shape[2]
    V: tl.constexpr = x.shape[3]
    y = tl.permute(tl.reshape(x, (L, G, J // (2 * H), 2, H, V)), (0, 1, 2, 4, 5, 3))
    return tl.reshape(tl.permute(_pairs(y), (0, 1, 2, 5, 3, 4)), (L, G, J, V))


@triton.jit
def hadamard(x, ORDER: tl.constexpr):
    """Transform each ``ORDER`` >= V elements of blocks of FP32 [L, G, J, V], not normalised."""
    L: tl.constexpr = x.shape[0]
    J: tl.constexpr = x.shape[2]
    V: tl.constexpr = x.shape[3]
    for k in tl.static_range(0, 4):
        if (1 << k) < V:
            x = _stage_in_vector(x, 1 << k)
    for k in tl.static_range(0, 5):
        if (1 << k) < L and (V << k) < ORDER:
            x = _stage_between_lanes(x, 1 << k)
    for k in tl.static_range(0, 6):
        if (1 << k) < J and (V * L << k) < ORDER:
            x = _stage_between_accesses(x, 1 << k)
    return x


@triton.jit
def block_sum_of_squares(x, FUSE: tl.constexpr):
    """Return the sum of squares of each block of FP32 [L, G, J, V], V >= 4: [L, G, 1, 1].

    ``FUSE`` adds a square to that of its neighbours in one operation, which changes nothing where
    squares are exact: for numbers of twelve bits, as BF16 and FP16 are. (The square of a BF16
    number below 2^-35 of the block's largest need not be; three nested ties would have to follow
    for that to reach the sum.)
    """
    L: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    J: tl.constexpr = x.shape[2]
    V: tl.constexpr = x.shape[3]
    even, odd = tl.split(tl.reshape(x, (L, G, J, V // 2, 2)))
    a, c = tl.split(tl.reshape(even, (L, G, J, V // 4, 2)))
    b, d = tl.split(tl.reshape(odd, (L, G, J, V // 4, 2)))
    if FUSE:
        x = tl.fma(d, d, tl.fma(c, c, tl.fma(b, b, a * a)))
    else:
        x = a * a + b * b + c * c + d * d
    for k in tl.static_range(2, 4):
        if (1 << k) < V:
            a, b = tl.split(tl.reshape(x, (L, G, J, V >> (k + 1), 2)))
            x = a + b
    x = tl.reshape(x, (L, G, J))
    for k in tl.static_range(0, 5):
        if (1 << k) < L:
            y = tl.reshape(x, (L >> (k + 1), 2, 1 << k, G, J))
            x = tl.reshape(y + _neighbour(y, 1), (L, G, J))
    for k in tl.static_range(0, 6):
        if (1 << k) < J:
            a, b = tl.split(tl.reshape(x, (L, G, J >> (k + 1), 2)))
            x = a + b
    return tl.reshape(x, (L, G, 1, 1))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_peak(x):
    """Return max |x| of each block of FP32 [L, G, J, V], NaN if it has one: [L, G, 1, 1]."""
    L: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    x = tl.reduce(tl.reduce(tl.abs(x), 3, _larger), 2, _larger)
    for k in tl.static_range(0, 5):
        if (1 << k) < L:
            y = tl.reshape(x, (L >> (k + 1), 2, 1 << k, G))
            x = tl.reshape(_larger(y, _neighbour(y, 1)), (L, G))
    return tl.reshape(x, (L, G, 1, 1))
