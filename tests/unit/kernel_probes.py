"""Small kernels that put parts of megatron_taco.kernels to the test one by one."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import quotient
from megatron_taco.kernels.float8 import from_float8, to_float8


@triton.jit
def convert_float8(x, codes, back, N: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """FP32 to FP8 codes and back, ``N`` numbers."""
    at = tl.arange(0, N)
    code = to_float8(tl.load(x + at), MANTISSA, BIAS)
    tl.store(codes + at, code.to(tl.uint8))
    tl.store(back + at, from_float8(code, MANTISSA, BIAS))


@triton.jit
def count_wrong_quotients(bad, DIGITS: tl.constexpr, N: tl.constexpr):
    """Add up where ``quotient`` and a division differ: five x at each number of few bits times d.

    A program takes ``N`` of the 2^23 mantissas of d.
    """
    d = ((127 << 23) + tl.program_id(0) * N + tl.arange(0, N)).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full((N,), 1.0, tl.float32), d)
    count = tl.zeros((N,), tl.int32)
    for i in range(1 << DIGITS):
        tie = 1.0 + i.to(tl.float32) * (1.0 / (1 << DIGITS))
        first = (tie * d).to(tl.int32, bitcast=True)
        for step in tl.static_range(-2, 3):
            x = (first + step).to(tl.float32, bitcast=True)
            count += (tl.div_rn(x, d) != quotient(x, d, inverse)).to(tl.int32)
    tl.atomic_add(bad, tl.sum(count))
