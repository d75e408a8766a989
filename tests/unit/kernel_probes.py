"""Small kernels that put parts of megatron_taco.kernels to the test one by one."""

import triton
import triton.language as tl

from megatron_taco.kernels.float8 import from_float8, to_float8


@triton.jit
def convert_float8(x, codes, back, N: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """FP32 to FP8 codes and back, ``N`` numbers."""
    at = tl.arange(0, N)
    code = to_float8(tl.load(x + at), MANTISSA, BIAS)
    tl.store(codes + at, code.to(tl.uint8))
    tl.store(back + at, from_float8(code, MANTISSA, BIAS))
