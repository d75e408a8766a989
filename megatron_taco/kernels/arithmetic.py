"""Exponents, powers of two and scales, operation for operation as blocks.py and scales.py."""

import triton
import triton.language as tl

# MODE of the kernels: nothing but Triton's own operations, for its interpreter; PTX; PTX with
# what compute capability 8.9 has: FP8 conversions, and max.xorsign.abs.
PORTABLE = tl.constexpr(0)
PTX = tl.constexpr(1)
FP8_CONVERSIONS = tl.constexpr(2)

MIN_EXPONENT = tl.constexpr(-100)
MAX_EXPONENT = tl.constexpr(126)
MAX_ADAPTIVE_SCALE = tl.constexpr(2.0**21)
SMALLEST_SCALE = tl.constexpr(2.0**-100)
SMALLEST_PLAIN_EXPONENT = tl.constexpr(-60)
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
def adaptive_scale(mean, TARGET: tl.constexpr, bound):
    """Return M / sqrt(mean), at most ``bound``; a NaN stays one (scales.py)."""
    alpha = tl.div_rn(tl.full(mean.shape, TARGET, tl.float32), tl.sqrt_rn(mean))
    return tl.where(alpha > bound, bound, alpha)


@triton.jit
def round_scale(x):
    """Round FP32 ``x`` >= 0 to 17 significant bits, halves up; a NaN stays one (scales.py)."""
    bits = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFF00)
    return ((bits + 0x40) & -0x80).to(tl.float32, bitcast=True)


@triton.jit
def without_tiny(scale):
    """Return ``scale``, or 0 where it is below 2^-100; a NaN stays one (scales.py)."""
    return tl.where(scale < SMALLEST_SCALE, 0.0, scale)


@triton.jit
def any_of(x):
    """Whether any element of an int1 tensor is set: a scalar."""
    return tl.max(tl.ravel(x.to(tl.int32)), 0) != 0
