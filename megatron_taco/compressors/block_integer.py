"""Symmetric few-bit integers with one scale a group, the quantiser of SDP4Bit (arXiv 2410.15526).

It differs from TACO's integer formats in that the group that shares a scale and the order of the
Hadamard transform are two settings: SDP4Bit rotates gradients by H_32 and scales groups of 128,
and scales differences of weights in groups of 2048 without rotation. The arithmetic is a definition
as TACO's is (``taco.py``): FP32, round to nearest even, fixed order, one rounding an operation.

Encoding one group x of B consecutive elements, the last one of a row padded with zeros:

    a   = max |x|;  e = clamp(floor(log2 a), -100, 126);  z = x * 2^-e
    y   = (I (x) H_T) z                         T consecutive elements at a time; y = z for T = 1
    c   = (max |y| * (1 / (sqrt(T) L))) * 2^e   L = 2^(bits-1) - 1; 17 bits (scales.py), then
                                                rounded to the scale's dtype
    v_i = clamp(y_i * (1 / (sqrt(T) c 2^-e)), -L, L)
    q_i = round half to even of v_i,  or  floor(v_i) + [u_i < v_i - floor(v_i)] if stochastic

u_i is uniform in [0, 1), from the key and the number of the element (``counter_random.py``): row r,
group j, element k of a call with g groups a row has the number (r * g + j) * B + k. A value that is
an integer already never moves, so zeros stay zeros.

Rounding to nearest, decoding, summing P payloads in rank order before the one inverse transform (it
is linear and shared) and the special groups are as in ``taco.py`` with merged scales: with T = B
the bytes are TACO's.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import ClassVar, Self

import torch
from torch import Tensor

from megatron_taco.compressors.base import VALUE_DTYPES, Compressor, into
from megatron_taco.compressors.blocks import (
    absolute_maximum,
    clamp_exponent,
    floor_exponent,
    from_columns,
    power_of_two,
    to_columns,
)
from megatron_taco.compressors.counter_random import uniform
from megatron_taco.compressors.dispatch import GroupKernels, GroupSettings, group_kernels_on
from megatron_taco.compressors.formats import CodeFormat, code_format
from megatron_taco.compressors.hadamard import butterflies_
from megatron_taco.compressors.layout import Layout
from megatron_taco.compressors.rotated import rotated_sum
from megatron_taco.compressors.scales import (
    floor_exponents,
    own_exponent,
    quant_scale,
    relative_scale,
)

BITS = (8, 6, 4)
GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TRANSFORMS = (1, 32, 64, 128, 256, 512)
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class BlockInteger(Compressor):
    """Integers of few bits, one scale a group; the arithmetic is in this module's docstring.

    A payload of n elements in g = ceil(n / B) groups is [codes: g * B * bits / 8 bytes][g scales].

    Attributes:
        bits: Bits of a code: 8, 6 or 4.
        block: Elements that share a scale, B: a power of two from 32 to 4096.
        transform: Order T of the Hadamard transform, at most ``block``; 1 is none.
        scale: Dtype of the scale on the wire: ``fp32`` or ``bf16``.
        rounding: ``nearest`` (ties to even) or ``stochastic``.
        key: What stochastic rounding depends on, besides the element's number: see :meth:`keyed`.

    Raises:
        ValueError: If a field has a value that is not allowed.
    """

    name: ClassVar[str] = "block_integer"
    bits: int = 4
    block: int = 128
    transform: int = 32
    scale: str = "bf16"
    rounding: str = "nearest"
    key: int = 0

    def __post_init__(self) -> None:
        """Check every field, then the combination."""
        fields: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("bits", BITS),
            ("block", GROUPS),
            ("transform", TRANSFORMS),
            ("scale", tuple(SCALE_DTYPES)),
            ("rounding", ROUNDINGS),
        )
        for field, allowed in fields:
            value = getattr(self, field)
            if not any(type(value) is type(a) and value == a for a in allowed):
                raise ValueError(
                    f"{self.name}: {field} is {value!r}, allowed are "
                    f"{', '.join(str(a) for a in allowed)}"
                )
        if self.transform > self.block:
            raise ValueError(
                f"{self.name}: transform is {self.transform}, allowed are at most the block, "
                f"{self.block}"
            )

    def keyed(self, key: int) -> Self:
        """Return this compressor with another key for stochastic rounding.

        Args:
            key: 64 bits from ``counter_random.key_of(seed, step, role, bucket, ...)``; messages
                with different keys are rounded independently.
        """
        return self if self.rounding == "nearest" else replace(self, key=key)

    def reference(self) -> "BlockInteger":
        """Return the same compressor in plain torch on every device: the kernels' oracle."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _Reference(**fields)

    def _kernels(self, device: torch.device, rows: int = 1) -> GroupKernels | None:
        """Return the kernels that replace the code below on ``device``, if there are any."""
        return group_kernels_on(device, self.bits, rows)

    @cached_property
    def _kernel_settings(self) -> GroupSettings:
        return GroupSettings(
            bits=self.bits,
            limit=self._code.limit,
            offset=self._code.offset,
            block=self.block,
            transform=self.transform,
            bf16=self.scale == "bf16",
            stochastic=self.rounding == "stochastic",
            key=self.key,
        )

    @cached_property
    def _code(self) -> CodeFormat:
        return code_format(f"int{self.bits}")

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.block, self.bits, (SCALE_DTYPES[self.scale],))

    def payload_bytes(self, numel: int) -> int:
        """Return ceil(n / B) * (B * bits / 8 + bytes of a scale).

        Raises:
            ValueError: If ``numel`` is negative.
        """
        if numel < 0:
            raise ValueError(f"{self.name}: numel is {numel}, allowed is 0 or more")
        return self._layout.payload_bytes(numel)

    def encode_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row of ``x`` [R, n] into its own payload: uint8 [R, payload_bytes(n)].

        With stochastic rounding the bytes of a row depend on its number, too.

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
        if kernels := self._kernels(x.device, rows):
            return kernels.encode_rows(self._kernel_settings, x, out)
        columns = to_columns(x.detach(), self.block)
        e = clamp_exponent(floor_exponent(absolute_maximum(columns)))
        y = self._rotate(columns * power_of_two(-e))
        return into(out, self._emit(y, e, rows, numel, self._norm))

    @property
    def _norm(self) -> float:
        """What the transform is yet to be multiplied by."""
        return 1.0 / sqrt(self.transform)

    def _rotate(self, columns: Tensor) -> Tensor:
        """Transform each T elements of FP32 [B, N], not normalised; uses ``columns`` up."""
        if self.transform == 1:
            return columns
        block, count = columns.shape
        parts = columns.view(block // self.transform, self.transform, count).transpose(0, 1)
        turned = butterflies_(parts.reshape(self.transform, -1).contiguous())
        turned = turned.view(self.transform, block // self.transform, count)
        return turned.transpose(0, 1).reshape(block, count)

    def _emit(self, y: Tensor, e: Tensor, rows: int, numel: int, norm: float) -> Tensor:
        """Scale, quantise and lay out norm * y * 2^e [B, R * g]; uses ``y`` up."""
        scale = quant_scale(absolute_maximum(y), norm / self._code.limit) * power_of_two(e)
        scale = scale.to(SCALE_DTYPES[self.scale])
        finite = scale.isfinite()
        usable = finite & (scale > 0)
        divisor = torch.where(usable, scale.float() * power_of_two(-e), 1.0)
        inverse = torch.full_like(divisor, norm) / divisor
        if self.rounding == "stochastic":
            v = y.mul_(inverse).clamp_(-self._code.limit, self._code.limit)
            codes = self._code.pack(self._round_randomly(v))
        else:
            codes = self._code.quantise(y, inverse)
        codes.mul_(usable.to(torch.uint8))
        return self._layout.write(rows, numel, codes, (torch.where(finite, scale, torch.nan),))

    def _round_randomly(self, v: Tensor) -> Tensor:
        u = uniform(v.numel(), self.key, v.device).view(v.shape[1], v.shape[0]).t()
        floor = v.floor()
        return floor + (u < v - floor).float()

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
        if kernels := self._kernels(payloads.device, rows):
            return kernels.decode_rows(self._kernel_settings, payloads, numel, dtype, out)
        q = self._code.unpack(self._layout.read_codes(payloads, numel))
        (scales,) = self._layout.read_scales(payloads, numel)
        e = own_exponent(floor_exponents(scales, None), self._code.limit)
        factor = relative_scale(scales, None, e) * self._norm
        values = self._rotate(q).mul_(factor.reshape(-1))
        values.mul_(power_of_two(e).reshape(-1))
        return into(out, from_columns(values, rows, numel, dtype))

    def _rotated_sum(self, payloads: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return FP32 z [B, g] and e [g]: the sum over the rows, rotated, is z * 2^e."""
        q = self._code.unpack(self._layout.read_codes(payloads, numel))
        (scales,) = self._layout.read_scales(payloads, numel)
        return rotated_sum(q, scales, None, self._code)

    def decode_sum(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Sum the values of uint8 [P, payload_bytes(numel)] in the order 0 .. P-1: FP32 [numel].

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
        z, e = self._rotated_sum(payloads, numel)
        values = self._rotate(z).mul_(power_of_two(e) * self._norm)
        return into(out, from_columns(values, 1, numel, torch.float32)[0])

    def reduce_encode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Encode the sum of uint8 [P, payload_bytes(numel)] again: uint8 [payload_bytes(numel)].

        No transform is needed. Stochastic rounding uses this compressor's key: give it another
        one than the payloads had.

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
        z, e = self._rotated_sum(payloads, numel)
        return into(out, self._emit(z, e, 1, numel, 1.0)[0])

    def nonfinite_blocks(self, payloads: Tensor, numel: int) -> Tensor:
        """Count the groups of uint8 [R, bytes] whose scale is NaN: 0-dim int64, not synchronised.

        Raises:
            TypeError: If the payloads are not uint8.
            ValueError: If the payloads have another shape than expected.
        """
        self.check_payloads(payloads, numel)
        return self._layout.read_scales(payloads, numel)[0].isnan().sum()


class _Reference(BlockInteger):
    """A block integer without kernels."""

    def _kernels(self, device: torch.device, rows: int = 1) -> GroupKernels | None:
        return None
