"""TACO: block Hadamard rotation, per-block scale, few-bit codes (arXiv 2604.24088).

The arithmetic below is a definition: kernels have to give the same bytes. All of it is FP32 with
round to nearest even, subnormals kept, no fused multiply-add and no approximate division.

Encoding one block x of B consecutive elements, the last one padded with zeros:

    a_x = max |x|
    e   = clamp(floor(log2 a_x), -100, 126)             from the exponent bits, blocks.py
    z   = x * 2^-e                                      one exact power of two; |z| < 4
    y   = H_B z                                         hadamard.py; y = z without rotation
    d   = max |y| * (1 / (sqrt(B) T))                   17 bits, scales.py; 1 / T without rotation
    q_i = round(clamp(y_i * (1 / (sqrt(B) d')), -T, T)) formats.py; the inverse is rounded to FP32,
                                                        the product for FP8 formats only

    dual:         sends alpha * d and alpha * 2^-e, FP32, alpha = min(M / sqrt(mean z^2), 2^21);
                  d' = d
    merged_fp32:  sends c = d * 2^e, FP32;              d' = c * 2^-e
    merged_bf16:  sends c = d * 2^e rounded to BF16;    d' = c * 2^-e: rounded before quantising

So the published s and alpha are sent, with s q = alpha H_B x / sqrt(B); that the values are not
multiplied by alpha changes no code, since s is proportional to it (papers.md 1.7, trap 3).

Decoding one payload, where c is s / alpha if dual:

    e = 0, or clamp(floor(log2 c) + floor(log2 T), -100, 126) where that is below -60
    x = (H_B q * ((c * 2^-e) / sqrt(B))) * 2^e          c * 2^-e has 17 bits, see scales.py

Summing P payloads, in the rotated domain (H is linear and shared, so it is left out; papers.md
4.1), one e for all ranks (scales.py):

    z = (c_0 2^-e) q_0 + (c_1 2^-e) q_1 + ...           each product exact, ranks in order
    INT4, INT6 with o = 24, 96:  z = -o (c_0 2^-e + ...) + (c_0 2^-e) (q_0 + o) + ...
    decode_sum:      x = H_B z * (2^e / sqrt(B))        one inverse transform
    reduce_encode:   as encoding from z on, with H left out

Special blocks: an all-zero block, or one whose scale underflows to 0, has codes and scale 0 (alpha
is 1) and decodes to +0. A NaN or an infinity in a block, or a merged scale beyond FP32, makes its
scale the canonical NaN and its codes 0 (alpha is 1): all of it decodes to NaN, and sums pass it on.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_taco.compressors import published
from megatron_taco.compressors.blocks import from_columns, to_columns
from megatron_taco.compressors.dispatch import Kernels
from megatron_taco.compressors.formats import FORMAT_NAMES
from megatron_taco.compressors.rotated import in_order
from megatron_taco.compressors.scaled import SCALES, ScaledBlocks

BLOCKS = (32, 64, 128, 256, 512)
ROTATIONS = ("hadamard", "none")
PUBLISHED_FORMATS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Taco(ScaledBlocks):
    """The TACO compressor; the arithmetic is in this module's docstring.

    A payload of n elements in g = ceil(n / B) blocks is [codes: g * B * bits / 8 bytes][scales:
    g FP32 s, then g FP32 alpha (dual) | g FP32 c | g BF16 c].

    Attributes:
        format: Code format: e4m3, e5m2, int8, int6 or int4.
        block: Elements per block B, also the size of the transform: 32, 64, 128, 256 or 512.
        rotation: ``hadamard``, or ``none`` for block scaling alone.
        scales: ``dual`` sends s and alpha as published; ``merged_fp32`` and ``merged_bf16`` send
            their ratio, which is all that decoding needs (papers.md 1.7, trap 3).
        published_clips: Reproduce the released code's clips and its NaN to 0 (published.py).
            Needs dual scales and an FP8 format.

    Raises:
        ValueError: If a field has a value that is not allowed, or two fields exclude each other.
    """

    name: ClassVar[str] = "taco"
    format: str = "e4m3"
    block: int = 256
    rotation: str = "hadamard"
    scales: str = "dual"
    published_clips: bool = False

    def __post_init__(self) -> None:
        """Check every field, then the combinations."""
        self.allow("format", self.format, FORMAT_NAMES)
        self.allow("block", self.block, BLOCKS)
        self.allow("rotation", self.rotation, ROTATIONS)
        self.allow("scales", self.scales, tuple(SCALES))
        self.allow("published_clips", self.published_clips, (False, True))
        if self.published_clips and self.scales != "dual":
            raise ValueError(
                f"taco: published_clips needs scales to be 'dual', found {self.scales!r}"
            )
        if self.published_clips and self.format not in PUBLISHED_FORMATS:
            raise ValueError(
                f"taco: published_clips needs format to be one of "
                f"{', '.join(PUBLISHED_FORMATS)}, found {self.format!r}"
            )

    @property
    def _format(self) -> str:
        return self.format

    @property
    def _scales(self) -> str:
        return self.scales

    @property
    def _order(self) -> int:
        return self.block if self._rotate else 1

    @property
    def _rotate(self) -> bool:
        return self.rotation == "hadamard"

    def _kernels(self, device: torch.device) -> Kernels | None:
        return None if self.published_clips else super()._kernels(device)

    def peer_problem(self, device: torch.device) -> str | None:
        """Say why there is no kernel to sum by on ``device``; None if there is one."""
        if self.published_clips:
            return "published_clips has no kernels; set published_clips: false"
        return super().peer_problem(device)

    def _encode(self, x: Tensor) -> Tensor:
        if not self.published_clips:
            return super()._encode(x)
        rows, numel = x.shape
        columns = to_columns(x.detach(), self.block)
        codes, *scales = published.encode_columns(columns, rows, numel, self._code, self._rotate)
        return self._layout.write(rows, numel, codes, tuple(scales))

    def _decode(self, payloads: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if not self.published_clips:
            return super()._decode(payloads, numel, dtype)
        q, scale, alpha = self._read(payloads, numel)
        assert alpha is not None
        values = published.decode_columns(q, scale.reshape(-1), alpha.reshape(-1), self._rotate)
        return from_columns(values, payloads.shape[0], numel, dtype)

    def _sum(self, payloads: Tensor, numel: int) -> Tensor:
        if not self.published_clips:
            return super()._sum(payloads, numel)
        return in_order(self._decode(payloads, numel, torch.float32))

    def _reduce(self, payloads: Tensor, numel: int) -> Tensor:
        if not self.published_clips:
            return super()._reduce(payloads, numel)
        return self.encode(self._sum(payloads, numel))
