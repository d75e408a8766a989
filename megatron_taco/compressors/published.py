"""TACO with the clips of the released code, as an arm of experiments (papers.md 1.2, traps 1-4).

What it does otherwise than the default: lambda = 1e-6 and clips on both scales (so alpha is the
constant 1000 for values whose RMS is below 0.448, and blocks beyond the clip of the second scale
saturate), no pre-scaling (so large blocks overflow), T and the clamp are 448 for both formats, and
NaN or infinity becomes 0. Padding is stored as whole blocks, which the released code gets wrong.
"""

import torch
from torch import Tensor

from megatron_taco.compressors.blocks import absolute_maximum, block_count
from megatron_taco.compressors.formats import CodeFormat
from megatron_taco.compressors.hadamard import hadamard_, sum_of_squares
from megatron_taco.compressors.scales import square_root

LIMIT = 448.0
VARIANCE_OFFSET = 1e-6
VARIANCE_FLOOR = 1e-12
ALPHA_RANGE = (1e-3, 1e3)
PEAK_FLOOR = 1e-12
SCALE_RANGE = (1e-12, 1e6)
DIVISOR_FLOOR = 1e-12


def finite_or_zero(x: Tensor) -> Tensor:
    """Replace NaN and infinities by 0."""
    return torch.where(x.isfinite(), x, 0.0)


def encode_columns(
    columns: Tensor, rows: int, numel: int, code: CodeFormat, rotate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode FP32 [B, R * g] as released: codes uint8 [code bytes, R * g], s and alpha [R * g].

    v is the mean over the elements that a block really has (n of papers.md 1.2), the last block's
    padding left out. A NaN in v gives alpha = 1000, as the released code's maximum does.
    """
    block = columns.shape[0]
    first = torch.arange(block_count(numel, block), device=columns.device) * block
    valid = (numel - first).clamp(max=block).float().repeat(rows)
    v = (sum_of_squares(columns) / valid + VARIANCE_OFFSET).clamp(min=VARIANCE_FLOOR)
    alpha = (torch.full_like(v, code.target) / square_root(v)).clamp(*ALPHA_RANGE)
    alpha = torch.where(alpha.isnan(), ALPHA_RANGE[1], alpha)
    y = columns * alpha
    y = finite_or_zero(hadamard_(y) if rotate else y)
    peak = absolute_maximum(y).clamp(min=PEAK_FLOOR)
    s = (peak / torch.full_like(peak, LIMIT)).clamp(*SCALE_RANGE)
    return code.pack(y / s, LIMIT), s, alpha


def decode_columns(q: Tensor, s: Tensor, alpha: Tensor, rotate: bool) -> Tensor:
    """Decode code values FP32 [B, N] with scales [N] as released: FP32 [B, N]; uses ``q`` up."""
    y = q.mul_(s)
    y = finite_or_zero(hadamard_(y) if rotate else y)
    return y / alpha.clamp(min=DIVISOR_FLOOR)
