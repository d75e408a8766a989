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
    INT4:  z = -24 (c_0 2^-e + ...) + (c_0 2^-e) (q_0 + 24) + ...
    decode_sum:      x = H_B z * (2^e / sqrt(B))        one inverse transform
    reduce_encode:   as encoding from z on, with H left out

Special blocks: an all-zero block, or one whose scale underflows to 0, has codes and scale 0 (alpha
is 1) and decodes to +0. A NaN or an infinity in a block, or a merged scale beyond FP32, makes its
scale the canonical NaN and its codes 0 (alpha is 1): all of it decodes to NaN, and sums pass it on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from megatron_taco.compressors import published
from megatron_taco.compressors.base import VALUE_DTYPES, Compressor, into
from megatron_taco.compressors.blocks import (
    absolute_maximum,
    clamp_exponent,
    floor_exponent,
    from_columns,
    power_of_two,
    to_columns,
)
from megatron_taco.compressors.dispatch import Kernels, KernelSettings, kernels_on
from megatron_taco.compressors.formats import FORMAT_NAMES, CodeFormat, code_format
from megatron_taco.compressors.hadamard import butterflies_
from megatron_taco.compressors.layout import Layout
from megatron_taco.compressors.rotated import in_order, rotated_sum
from megatron_taco.compressors.scales import (
    adaptive_scale,
    floor_exponents,
    own_exponent,
    quant_scale,
    relative_scale,
)

BLOCKS = (32, 64, 128, 256, 512)
ROTATIONS = ("hadamard", "none")
SCALES = {
    "dual": (torch.float32, torch.float32),
    "merged_fp32": (torch.float32,),
    "merged_bf16": (torch.bfloat16,),
}
PUBLISHED_FORMATS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Taco(Compressor):
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
        self._allow("format", self.format, FORMAT_NAMES)
        self._allow("block", self.block, BLOCKS)
        self._allow("rotation", self.rotation, ROTATIONS)
        self._allow("scales", self.scales, tuple(SCALES))
        self._allow("published_clips", self.published_clips, (False, True))
        if self.published_clips and self.scales != "dual":
            raise ValueError(
                f"taco: published_clips needs scales to be 'dual', found {self.scales!r}"
            )
        if self.published_clips and self.format not in PUBLISHED_FORMATS:
            raise ValueError(
                f"taco: published_clips needs format to be one of "
                f"{', '.join(PUBLISHED_FORMATS)}, found {self.format!r}"
            )

    def _allow(self, field: str, value: object, allowed: tuple[object, ...]) -> None:
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(
                f"taco: {field} is {value!r}, allowed are {', '.join(str(a) for a in allowed)}"
            )

    @cached_property
    def _code(self) -> CodeFormat:
        return code_format(self.format)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.block, self._code.bits, SCALES[self.scales])

    @cached_property
    def _kernel_settings(self) -> KernelSettings:
        return KernelSettings(
            self.format,
            self._code.bits,
            self._code.limit,
            self._code.target,
            self.scales,
            sum(dtype.itemsize for dtype in SCALES[self.scales]),
            self._rotate,
            self.block,
            self._code.offset,
        )

    def _kernels(self, device: torch.device) -> Kernels | None:
        """Return the kernels that replace the code below on ``device``, if there are any."""
        if self.published_clips:
            return None
        return kernels_on(device, self.format, self.scales)

    def reference(self) -> "Taco":
        """Return the same compressor in plain torch on every device: the kernels' oracle."""
        return _Reference(self.format, self.block, self.rotation, self.scales, self.published_clips)

    @property
    def _dual(self) -> bool:
        return self.scales == "dual"

    @property
    def _rotate(self) -> bool:
        return self.rotation == "hadamard"

    def payload_bytes(self, numel: int) -> int:
        """Return ceil(n / B) * (B * bits / 8 + bytes of a block's scales).

        Raises:
            ValueError: If ``numel`` is negative.
        """
        if numel < 0:
            raise ValueError(f"taco: numel is {numel}, allowed is 0 or more")
        return self._layout.payload_bytes(numel)

    def encode_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row of ``x`` [R, n] into its own payload: uint8 [R, payload_bytes(n)].

        Args:
            x: FP32, BF16 or FP16, of any strides; its gradient history is ignored.
            out: Where the payloads go, if not into a new tensor.

        Raises:
            TypeError: If ``x`` is of another dtype.
            ValueError: If ``x`` has not two dimensions, or ``out`` is not what is returned.
        """
        self.check_values(x)
        rows, numel = x.shape
        self.check_out(out, (rows, self.payload_bytes(numel)), (torch.uint8,), x.device)
        if x.numel() == 0:
            return into(out, x.new_empty(rows, self.payload_bytes(numel), dtype=torch.uint8))
        if kernels := self._kernels(x.device):
            return kernels.encode_rows(self._kernel_settings, x, out)
        return into(out, self._encode(x))

    def _encode(self, x: Tensor) -> Tensor:
        rows, numel = x.shape
        columns = to_columns(x.detach(), self.block)
        if self.published_clips:
            codes, *scales = published.encode_columns(
                columns, rows, numel, self._code, self._rotate
            )
            return self._layout.write(rows, numel, codes, tuple(scales))
        e = clamp_exponent(floor_exponent(absolute_maximum(columns)))
        return self._emit(columns * power_of_two(-e), e, rows, numel, self._rotate)

    def _emit(self, z: Tensor, e: Tensor, rows: int, numel: int, rotate: bool) -> Tensor:
        """Scale, rotate if asked to, quantise and lay out z * 2^e [B, R * g]; uses ``z`` up."""
        norm = self._norm if rotate else 1.0
        alpha = adaptive_scale(z, self._code.target) if self._dual else None
        y = butterflies_(z) if rotate else z
        scale = quant_scale(absolute_maximum(y), norm / self._code.limit)
        divisor = scale
        if alpha is None:
            scale = (scale * power_of_two(e)).to(SCALES[self.scales][0])
            divisor = scale.float() * power_of_two(-e)
        else:
            scale = scale * alpha
        finite = scale.isfinite()
        usable = finite & (scale > 0)
        inverse = torch.full_like(divisor, norm) / torch.where(usable, divisor, 1.0)
        codes = self._code.quantise(y, inverse)
        codes.mul_(usable.to(torch.uint8))
        sent: tuple[Tensor, ...] = (torch.where(finite, scale, torch.nan),)
        if alpha is not None:
            sent += (torch.where(usable, alpha * power_of_two(-e), 1.0),)
        return self._layout.write(rows, numel, codes, sent)

    def decode_rows(
        self, payloads: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Decode uint8 [R, payload_bytes(numel)] to values of ``dtype`` [R, numel].

        Args:
            payloads: The payloads.
            numel: Elements of a row.
            dtype: Of the values.
            out: Where the values go, if not into a new tensor.

        Raises:
            TypeError: If the payloads are not uint8 or ``dtype`` is not FP32, BF16 or FP16.
            ValueError: If the payloads have another shape than expected, or ``out`` is not what
                is returned.
        """
        self.check_payloads(payloads, numel)
        self.check_dtype(dtype, "the output asked for")
        rows = payloads.shape[0]
        self.check_out(out, (rows, numel), (dtype,), payloads.device)
        if numel == 0:
            return into(out, torch.empty(rows, 0, dtype=dtype, device=payloads.device))
        if kernels := self._kernels(payloads.device):
            return kernels.decode_rows(self._kernel_settings, payloads, numel, dtype, out)
        return into(out, self._decode(payloads, numel, dtype))

    def _decode(self, payloads: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        q = self._code.unpack(self._layout.read_codes(payloads, numel))
        scale, alpha = self._read_scales(payloads, numel)
        if self.published_clips:
            assert alpha is not None
            values = published.decode_columns(q, scale.reshape(-1), alpha.reshape(-1), self._rotate)
        else:
            e = own_exponent(floor_exponents(scale, alpha), self._code.limit)
            factor = relative_scale(scale, alpha, e) * self._norm
            values = self._unrotate(q).mul_(factor.reshape(-1))
            values.mul_(power_of_two(e).reshape(-1))
        return from_columns(values, payloads.shape[0], numel, dtype)

    def _read_scales(self, payloads: Tensor, numel: int) -> tuple[Tensor, Tensor | None]:
        """Return s and alpha, or c and None: FP32 [R, g]."""
        scale, *second = self._layout.read_scales(payloads, numel)
        return scale, second[0] if second else None

    @property
    def _norm(self) -> float:
        """What the transform is yet to be multiplied by."""
        return 1.0 / sqrt(self.block) if self._rotate else 1.0

    def _unrotate(self, z: Tensor) -> Tensor:
        return butterflies_(z) if self._rotate else z

    def _rotated_sum(self, payloads: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return FP32 z [B, g] and e [g]: the sum over the rows, rotated, is z * 2^e."""
        q = self._code.unpack(self._layout.read_codes(payloads, numel))
        scale, alpha = self._read_scales(payloads, numel)
        return rotated_sum(q, scale, alpha, self._code)

    def _published_sum(self, payloads: Tensor, numel: int) -> Tensor:
        """Sum decoded rows in rank order, as the released code does: FP32 [numel]."""
        return in_order(self.decode_rows(payloads, numel, torch.float32))

    def decode_sum(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Sum the values of uint8 [P, payload_bytes(numel)] in the order 0 .. P-1: FP32 [numel].

        The sum is taken before the one inverse transform; equal to decoding first but for FP32
        rounding.

        Args:
            payloads: The payloads.
            numel: Elements of each.
            out: Where the sum goes, if not into a new FP32 tensor: FP32, BF16 or FP16 [numel],
                contiguous; the FP32 sum is rounded to its dtype once.

        Raises:
            TypeError: If the payloads are not uint8, or ``out`` has another dtype.
            ValueError: If the payloads or ``out`` have another shape than expected.
        """
        self.check_payloads(payloads, numel)
        self.check_out(out, (numel,), VALUE_DTYPES, payloads.device)
        if numel == 0:
            return into(out, torch.empty(0, dtype=torch.float32, device=payloads.device))
        if kernels := self._kernels(payloads.device):
            return kernels.decode_sum(self._kernel_settings, payloads, numel, out)
        if self.published_clips:
            return into(out, self._published_sum(payloads, numel))
        z, e = self._rotated_sum(payloads, numel)
        values = self._unrotate(z).mul_(power_of_two(e) * self._norm)
        return into(out, from_columns(values, 1, numel, torch.float32)[0])

    def peer_problem(self, device: torch.device) -> str | None:
        """Say why there is no kernel to sum by on ``device``; None if there is one."""
        if self.published_clips:
            return "published_clips has no kernels; set published_clips: false"
        if self._kernels(device) is None:
            return (
                f"format {self.format} with scales {self.scales} has no kernels in use on "
                f"{device}; they need Triton, a GPU of compute capability 8.0 or above and "
                "scales: dual"
            )
        return None

    def decode_sum_peers(self, addresses: Tensor, numel: int, out: Tensor) -> Tensor:
        """Sum the payloads at ``addresses`` by one kernel, to the bits of ``decode_sum``.

        Args:
            addresses: As in ``Compressor.decode_sum_peers``.
            numel: Elements of each.
            out: Where the sum goes: FP32, BF16 or FP16 [numel], contiguous.

        Raises:
            TypeError: If there is no kernel, or a dtype is another.
            ValueError: If a tensor has another shape than expected.
        """
        kernels = self._kernels(out.device)
        if kernels is None:
            raise TypeError(f"taco: {self.peer_problem(out.device)}")
        self.check_addresses(addresses, out.device)
        self.check_out(out, (numel,), VALUE_DTYPES, addresses.device)
        if numel == 0:
            return out
        return kernels.decode_sum_peers(self._kernel_settings, addresses, numel, out)

    def reduce_encode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Encode the sum of uint8 [P, payload_bytes(numel)] again: uint8 [payload_bytes(numel)].

        No transform is needed, but with ``published_clips``, which decodes and encodes.

        Args:
            payloads: The payloads.
            numel: Elements of each.
            out: Where the payload goes, if not into a new tensor.

        Raises:
            TypeError: If the payloads are not uint8.
            ValueError: If the payloads have another shape than expected, or ``out`` is not what
                is returned.
        """
        self.check_payloads(payloads, numel)
        self.check_out(out, (self.payload_bytes(numel),), (torch.uint8,), payloads.device)
        if numel == 0:
            return into(out, payloads.new_empty(0))
        if kernels := self._kernels(payloads.device):
            return kernels.reduce_encode(self._kernel_settings, payloads, numel, out)
        if self.published_clips:
            return into(out, self.encode(self._published_sum(payloads, numel)))
        z, e = self._rotated_sum(payloads, numel)
        return into(out, self._emit(z, e, 1, numel, rotate=False)[0])

    def nonfinite_blocks(self, payloads: Tensor, numel: int) -> Tensor:
        """Count the blocks of uint8 [R, bytes] whose scale is NaN: 0-dim int64, not synchronised.

        Raises:
            TypeError: If the payloads are not uint8.
            ValueError: If the payloads have another shape than expected.
        """
        self.check_payloads(payloads, numel)
        return self._layout.read_scales(payloads, numel)[0].isnan().sum()

    def warm_up(
        self, shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> list[str]:
        """Compile the kernels that rows of ``shapes`` and ``dtypes`` will need on ``device``."""
        if kernels := self._kernels(device):
            return kernels.warm_up(self._kernel_settings, shapes, dtypes, device)
        return []


class _Reference(Taco):
    """TACO without kernels."""

    def _kernels(self, device: torch.device) -> Kernels | None:
        return None
