"""The scales of payloads as sums and decoding need them, see ``compressors/scales.py``."""

import triton
import triton.language as tl

from megatron_taco.kernels.arithmetic import (
    PORTABLE,
    floor_exponent,
    power_of_two,
    round_scale,
    without_tiny,
)
from megatron_taco.kernels.tiles import block_index, load_scale


@triton.jit
def load_scales(base, first, count, G: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the scales of a tile of one payload: s and alpha, or c and 1.

    Arguments as of ``load_scale``. Blocks beyond the last have s or c 0 and alpha 1.
    """
    scale = load_scale(base, first, count, G, SCALES == "merged_bf16", ALIGNED)
    alpha = tl.full(scale.shape, 1.0, tl.float32)
    if SCALES == "dual":
        found = load_scale(base + 4 * count, first, count, G, False, ALIGNED)
        alpha = tl.where(first + block_index(G) < count, found, alpha)
    return scale, alpha


@triton.jit
def scale_exponent(s, alpha, SCALES: tl.constexpr):
    """Return the floor exponent of c, or about that of s / alpha."""
    if SCALES == "dual":
        return floor_exponent(s) - floor_exponent(alpha)
    return floor_exponent(s)


@triton.jit
def _nearly_divided(s, d):
    """Return s / d to within two units; 0 for d of 2^126 or more."""
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=r,r",
        [d],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    return s * inverse


@triton.jit
def relative_scale(s, alpha, e, SCALES: tl.constexpr, MODE: tl.constexpr):
    """Return s / alpha * 2^-e or c * 2^-e, of 17 bits, 0 below 2^-100.

    As s is alpha times a number of 17 bits, rounded, an inexact quotient is rounded to that number
    as well as a correctly rounded one. And s is below 2^6, so the quotients that
    ``_nearly_divided`` makes 0 are below 2^-100. alpha * 2^e is normal: about s T, or more.
    """
    if SCALES == "dual":
        d = alpha * power_of_two(e)
        if MODE == PORTABLE:
            ratio = tl.div_rn(s, d)
        else:
            ratio = _nearly_divided(s, d)
    else:
        ratio = s * power_of_two(-e)
    return without_tiny(round_scale(ratio))
