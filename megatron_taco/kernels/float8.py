"""FP8 in integer operations, for GPUs without the instructions (below 8.9) and for the CPU.

Both formats are the upper bits of an FP32 number whose exponent is offset, subnormals included.
"""

import triton
import triton.language as tl


@triton.jit
def to_float8(q, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round FP32 ``q`` within the format's range to nearest even: int32 codes of 8 bits.

    Subnormals: adding 2^(24 - MANTISSA - BIAS) leaves their codes in the lowest bits of the sum.

    Args:
        q: Any shape, |q| at most the largest number of the format.
        MANTISSA: Bits of the mantissa, 3 for E4M3 and 2 for E5M2.
        BIAS: Of the exponent, 7 for E4M3 and 15 for E5M2.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = q.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    ANCHOR: tl.constexpr = (127 + 24 - MANTISSA - BIAS) << 23
    anchor = tl.full(q.shape, ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    small = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - ANCHOR
    odd = (magnitude >> SHIFT) & 1
    large = (magnitude - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, large)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def from_float8(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the FP32 value of each 8-bit code, exactly; NaN codes are not decoded as such."""
    wide = code.to(tl.int32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << (23 - MANTISSA))
    scale = tl.full(wide.shape, (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * scale
