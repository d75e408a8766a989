"""Exact powers of two, and division that rounds as IEEE 754 asks but costs three instructions."""

import triton
import triton.language as tl

# MODE of the kernels: nothing but Triton's own operations, for its interpreter; PTX; PTX with
# what compute capability 8.9 has: FP8 conversions, and max.xorsign.abs.
PORTABLE = tl.constexpr(0)
PTX = tl.constexpr(1)
FP8_CONVERSIONS = tl.constexpr(2)

MIN_EXPONENT = tl.constexpr(-100)
MAX_EXPONENT = tl.constexpr(126)
MAX_ADAPTIVE_SCALE = tl.constexpr(2.0**20)
CANONICAL_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def floor_exponent(x):
    """Return floor(log2 x) of FP32 ``x`` >= 0; zeros and subnormals -127, Inf and NaN 128."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def clamp_exponent(e):
    """Limit block exponents to where 2^e and 2^-e are both normal."""
    return tl.minimum(tl.maximum(e, MIN_EXPONENT), MAX_EXPONENT)


@triton.jit
def power_of_two(e):
    """Return 2^e, exactly, for e in [-126, 127]: FP32."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    """Whether FP32 ``x`` is neither infinite nor NaN."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def adaptive_scale(mean, TARGET: tl.constexpr):
    """Return M / sqrt(mean), at most 2^20; a NaN stays one (scales.py)."""
    alpha = tl.div_rn(tl.full(mean.shape, TARGET, tl.float32), tl.sqrt_rn(mean))
    return tl.where(alpha > MAX_ADAPTIVE_SCALE, MAX_ADAPTIVE_SCALE, alpha)


@triton.jit
def quotient(x, d, inverse):
    """Return x / d, where ``inverse`` is 1 / d correctly rounded.

    A product, its remainder, a correction. As long as neither the inverse nor the remainder
    leaves the normal range, the result is the correctly rounded quotient wherever that lies near
    a number of twelve bits or fewer, which is what rounding it to a code, BF16 or FP16 depends
    on: checked for all 2^23 mantissas of d (docs/results/kernels.md). The remainder is taken as
    q d - x, not x - q d, for the sign of zero quotients.
    """
    q = x * inverse
    # Triton's unary minus is a subtraction from +0, which is slower and loses the sign of zeros.
    return tl.fma(tl.fma(q, d, x * -1.0), inverse * -1.0, q)


@triton.jit
def settled(x, MODE: tl.constexpr):
    """Return FP32 ``x``; the compiler may not compute it twice, for users in different layouts."""
    if MODE == PORTABLE:
        y = x
    else:
        y = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return y
