"""What TACO and block integers share: blocks of codes, their scales, sums, and the way to kernels.

The arithmetic is in the docstrings of ``taco.py`` and ``block_integer.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
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
from megatron_taco.compressors.dispatch import Kernels, KernelSettings, kernels_on
from megatron_taco.compressors.formats import CodeFormat, code_format
from megatron_taco.compressors.hadamard import butterflies_
from megatron_taco.compressors.layout import Layout
from megatron_taco.compressors.rotated import rotated_sum
from megatron_taco.compressors.scales import (
    adaptive_scale,
    floor_exponents,
    own_exponent,
    quant_scale,
    relative_scale,
)

SCALES = {
    "dual": (torch.float32, torch.float32),
    "merged_fp32": (torch.float32,),
    "merged_bf16": (torch.bfloat16,),
}


class ScaledBlocks(Compressor):
    """Codes of blocks with one or two scales each; subclasses are frozen dataclasses.

    A payload of n elements in g = ceil(n / B) blocks is [codes: g * B * bits / 8 bytes][scales:
    g FP32 s, then g FP32 alpha (dual) | g FP32 c | g BF16 c].
    """

    _plain: ClassVar[bool] = False

    @property
    @abstractmethod
    def _format(self) -> str:
        """Name of the code format."""

    @property
    @abstractmethod
    def _scales(self) -> str:
        """What is sent beside codes: one of ``SCALES``."""

    @property
    @abstractmethod
    def _order(self) -> int:
        """Elements that are transformed together; 1 for none."""

    @property
    def _key(self) -> int | None:
        """What random rounding depends on; None to round to nearest."""
        return None

    @cached_property
    def _code(self) -> CodeFormat:
        return code_format(self._format)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.block, self._code.bits, SCALES[self._scales])

    @cached_property
    def _norm(self) -> float:
        """What a transform's results are yet to be multiplied by."""
        return 1.0 / sqrt(self._order)

    @cached_property
    def _settings(self) -> KernelSettings:
        return KernelSettings(
            self._format,
            self._code.bits,
            self._code.limit,
            self._code.target,
            self._scales,
            sum(dtype.itemsize for dtype in SCALES[self._scales]),
            self._order,
            self.block,
            self._code.offset,
            self._key is not None,
        )

    def _kernels(self, device: torch.device) -> Kernels | None:
        """Return the kernels that replace the code below on ``device``, if there are any."""
        return None if self._plain else kernels_on(device)

    def has_kernels(self, device: torch.device) -> bool:
        """Whether kernels, and not torch, do the work on ``device``."""
        return self._kernels(device) is not None

    def reference(self) -> Self:
        """Return the same compressor in plain torch on every device: the kernels' oracle."""
        plain = copy(self)
        object.__setattr__(plain, "_plain", True)
        return plain

    def allow(self, field: str, value: object, allowed: tuple[object, ...]) -> None:
        """Refuse a setting that is not one of ``allowed``, True and 1 being different.

        Raises:
            ValueError: With the field, what was found and what is allowed.
        """
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(
                f"{self.name}: {field} is {value!r}, allowed are "
                f"{', '.join(str(a) for a in allowed)}"
            )

    def payload_bytes(self, numel: int) -> int:
        """Return ceil(n / B) * (B * bits / 8 + bytes of a block's scales).

        Raises:
            ValueError: If ``numel`` is negative.
        """
        if numel < 0:
            raise ValueError(f"{self.name}: numel is {numel}, allowed is 0 or more")
        return self._layout.payload_bytes(numel)

    def encode_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row of ``x`` [R, n] into its own payload: uint8 [R, payload_bytes(n)].

        With random rounding the bytes of a row depend on its number, too.

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
            return kernels.encode_rows(self._settings, x, out, self._key or 0)
        return into(out, self._encode(x))

    def _encode(self, x: Tensor) -> Tensor:
        columns = to_columns(x.detach(), self.block)
        e = clamp_exponent(floor_exponent(absolute_maximum(columns)))
        rows, numel = x.shape
        return self._emit(columns * power_of_two(-e), e, rows, numel, self._order)

    def _emit(self, z: Tensor, e: Tensor, rows: int, numel: int, order: int) -> Tensor:
        """Scale, transform, quantise and lay out z * 2^e [B, R * g]; uses ``z`` up."""
        norm = 1.0 / sqrt(order)
        dual = self._scales == "dual"
        alpha = adaptive_scale(z, self._code.target) if dual else None
        y = butterflies_(z, order)
        scale = quant_scale(absolute_maximum(y), norm / self._code.limit)
        divisor = scale
        if alpha is None:
            scale = (scale * power_of_two(e)).to(self._layout.scales[0])
            divisor = scale.float() * power_of_two(-e)
        else:
            scale = scale * alpha
        finite = scale.isfinite()
        usable = finite & (scale > 0)
        inverse = torch.full_like(divisor, norm) / torch.where(usable, divisor, 1.0)
        codes = self._quantise(y, inverse)
        codes.mul_(usable.to(torch.uint8))
        sent: tuple[Tensor, ...] = (torch.where(finite, scale, torch.nan),)
        if alpha is not None:
            sent += (torch.where(usable, alpha * power_of_two(-e), 1.0),)
        return self._layout.write(rows, numel, codes, sent)

    def _quantise(self, y: Tensor, inverse: Tensor) -> Tensor:
        """Return the codes of y [B, N] times ``inverse`` [N]; uses ``y`` up."""
        return self._code.quantise(y, inverse)

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
            return kernels.decode_rows(self._settings, payloads, numel, dtype, out)
        return into(out, self._decode(payloads, numel, dtype))

    def _decode(self, payloads: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        q, scale, alpha = self._read(payloads, numel)
        e = own_exponent(floor_exponents(scale, alpha), self._code.limit)
        factor = relative_scale(scale, alpha, e) * self._norm
        values = butterflies_(q, self._order).mul_(factor.reshape(-1))
        values.mul_(power_of_two(e).reshape(-1))
        return from_columns(values, payloads.shape[0], numel, dtype)

    def _read(self, payloads: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes' values FP32 [B, R * g], and s and alpha, or c and None: FP32 [R, g]."""
        q = self._code.unpack(self._layout.read_codes(payloads, numel))
        scale, *second = self._layout.read_scales(payloads, numel)
        return q, scale, second[0] if second else None

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
            return kernels.decode_sum(self._settings, payloads, numel, out)
        return into(out, self._sum(payloads, numel))

    def _sum(self, payloads: Tensor, numel: int) -> Tensor:
        z, e = rotated_sum(*self._read(payloads, numel), self._code)
        values = butterflies_(z, self._order).mul_(power_of_two(e) * self._norm)
        return from_columns(values, 1, numel, torch.float32)[0]

    def peer_problem(self, device: torch.device) -> str | None:
        """Say why there is no kernel to sum by on ``device``; None if there is one."""
        if not self.has_kernels(device):
            return (
                f"there are no kernels on {device}; they need Triton and a GPU of compute "
                "capability 8.0 or above"
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
            raise TypeError(f"{self.name}: {self.peer_problem(out.device)}")
        self.check_addresses(addresses, out.device)
        self.check_out(out, (numel,), VALUE_DTYPES, addresses.device)
        if numel == 0:
            return out
        return kernels.decode_sum_peers(self._settings, addresses, numel, out)

    def reduce_encode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Encode the sum of uint8 [P, payload_bytes(numel)] again: uint8 [payload_bytes(numel)].

        No transform is needed. Random rounding uses this compressor's key: give it another one
        than the payloads had.

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
            return kernels.reduce_encode(self._settings, payloads, numel, out, self._key or 0)
        return into(out, self._reduce(payloads, numel))

    def _reduce(self, payloads: Tensor, numel: int) -> Tensor:
        z, e = rotated_sum(*self._read(payloads, numel), self._code)
        return self._emit(z, e, 1, numel, 1)[0]

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
            return kernels.warm_up(self._settings, shapes, dtypes, device)
        return []
