"""8-bit block Hadamard with an offset: what COCCL calls tahquant in the forward direction.

A block of B consecutive values, the last one padded with zeros (papers.md 1.5):

    y = H_B x / sqrt(B);  low = min y;  s = (max y - low) / 255;  q = round((y - low) / s)

with each block scaled by a power of two before and after, so that finite values stay finite.

Payload of g blocks: [q: g * B bytes][s: g FP32][low: g FP32], so 1 + 8 / B bytes a value. A block
with a NaN or an infinity gets s = NaN and decodes to NaN.
"""

from math import prod

import torch
from torch import Tensor

from megatron_taco.boundaries.quantizers import Quantizer, check_values
from megatron_taco.compressors.blocks import (
    absolute_maximum,
    block_count,
    clamp_exponent,
    floor_exponent,
    from_columns,
    power_of_two,
    to_columns,
)
from megatron_taco.compressors.hadamard import hadamard_
from megatron_taco.compressors.layout import Layout
from megatron_taco.compressors.taco import BLOCKS

_LEVELS = 255.0


class AffineHadamard(Quantizer):
    """The quantiser above.

    Args:
        block: Values of a block B.

    Raises:
        ValueError: If ``block`` is not allowed.
    """

    def __init__(self, block: int = 128) -> None:
        if block not in BLOCKS:
            raise ValueError(f"affine: block is {block}, allowed are {', '.join(map(str, BLOCKS))}")
        self.block = block
        self._layout = Layout(block, 8, (torch.float32, torch.float32))

    def encoded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return ceil(n / B) * (B + 8)."""
        return self._layout.payload_bytes(prod(shape))

    def encode(self, x: Tensor, learn: bool = False) -> Tensor:
        """Encode FP32, BF16 or FP16 values in memory order.

        Raises:
            TypeError: If ``x`` has another dtype.
        """
        check_values(x, "affine")
        values = x.detach().reshape(1, -1)
        columns = to_columns(values, self.block)
        e = clamp_exponent(floor_exponent(absolute_maximum(columns)))
        y = hadamard_(columns * power_of_two(-e))
        low = y.amin(0)
        scale = (y.amax(0) - low) / _LEVELS
        divisor = torch.where(scale > 0, scale, 1.0)
        codes = ((y - low) / divisor).nan_to_num_(0.0).round_().clamp_(0.0, _LEVELS)
        sent = (scale * power_of_two(e), low * power_of_two(e))
        scale = torch.where(sent[0].isfinite() & sent[1].isfinite(), sent[0], torch.nan)
        return self._layout.write(1, x.numel(), codes.to(torch.uint8), (scale, sent[1]))[0]

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode to a tensor of ``shape`` and ``dtype``."""
        numel = prod(shape)
        rows = payload.unsqueeze(0)
        codes = self._layout.read_codes(rows, numel).float()
        scale, low = (
            each.view(block_count(numel, self.block))
            for each in self._layout.read_scales(rows, numel)
        )
        largest = torch.maximum(low.abs(), scale * _LEVELS)
        e = clamp_exponent(floor_exponent(largest))
        y = codes.mul_(scale * power_of_two(-e)).add_(low * power_of_two(-e))
        return from_columns(hadamard_(y).mul_(power_of_two(e)), 1, numel, dtype).view(shape)
