"""What every compressor offers: tensor to bytes and back, with no process group in sight."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Compressor(ABC):
    """A stateless code for FP32, BF16 and FP16 values, linear after decoding.

    A *payload* is a contiguous ``uint8`` vector that holds codes and scales together, so one
    message per peer is enough. Its size follows from the number of elements and the settings
    alone. A *row* is one payload of several that are made or read in one call: one per peer.

    Nothing here synchronises with the host.
    Subclasses are frozen dataclasses; equal settings mean equal bytes.

    Attributes:
        name: What ``build`` and the configuration call this compressor.
        block: Elements that share a scale. The error of a block depends on that block alone.
    """

    name: ClassVar[str]
    block: int

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Return the size in bytes of the payload of ``numel`` elements (0 for 0)."""

    @abstractmethod
    def encode_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row of ``x`` [R, n] into its own payload: uint8 [R, payload_bytes(n)].

        Args:
            x: The values.
            out: Where the payloads go, if not into a new tensor.

        Raises:
            TypeError: If ``x`` is not FP32, BF16 or FP16.
            ValueError: If ``x`` has not two dimensions, or ``out`` is not what is returned.
        """

    @abstractmethod
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

    @abstractmethod
    def decode_sum(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Sum the decoded values of uint8 [P, payload_bytes(numel)] to FP32 [numel].

        The sum is of decoded values, never of codes, in FP32 and in the order 0 .. P-1.

        Args:
            payloads: The payloads.
            numel: Elements of each.
            out: Where the sum goes, if not into a new FP32 tensor: FP32, BF16 or FP16 [numel],
                contiguous; the FP32 sum is rounded to its dtype once.

        Raises:
            TypeError: If the payloads are not uint8, or ``out`` has another dtype.
            ValueError: If the payloads or ``out`` have another shape than expected.
        """

    @abstractmethod
    def reduce_encode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Decode uint8 [P, bytes], sum as ``decode_sum`` does, encode again: uint8 [bytes].

        Args:
            payloads: The payloads.
            numel: Elements of each.
            out: Where the payload goes, if not into a new tensor.

        Raises:
            TypeError: If the payloads are not uint8.
            ValueError: If the payloads have another shape than expected, or ``out`` is not what
                is returned.
        """

    @abstractmethod
    def nonfinite_blocks(self, payloads: Tensor, numel: int) -> Tensor:
        """Count blocks marked non-finite in uint8 [R, bytes]: 0-dim int64, not synchronised."""

    def peer_problem(self, device: torch.device) -> str | None:
        """Say what keeps ``decode_sum_peers`` from working on ``device``, and what to change.

        Returns:
            None if it works there.
        """
        return f"the compressor {self.name} has no kernel that reads the memory of peers"

    def decode_sum_peers(self, addresses: Tensor, numel: int, out: Tensor) -> Tensor:
        """Sum the values of payloads that lie at ``addresses``, as ``decode_sum`` does.

        Args:
            addresses: int64 [P], on the device of ``out``: where P payloads of
                ``payload_bytes(numel)`` bytes start, all at multiples of 16, in memory that this
                device can read; peers' memory too.
            numel: Elements of each.
            out: Where the sum goes: FP32, BF16 or FP16 [numel], contiguous.

        Raises:
            TypeError: If ``peer_problem`` says why it cannot, or a dtype is another.
            ValueError: If a tensor has another shape than expected.
        """
        raise TypeError(f"{self.name}: {self.peer_problem(out.device)}")

    def check_addresses(self, addresses: Tensor, device: torch.device) -> None:
        """Refuse a table of addresses that is not int64 [P >= 1], contiguous, on ``device``."""
        if addresses.dtype != torch.int64:
            raise TypeError(f"{self.name}: addresses are {addresses.dtype}, allowed is torch.int64")
        right = addresses.dim() == 1 and addresses.numel() > 0 and addresses.is_contiguous()
        if not right or addresses.device != device:
            raise ValueError(
                f"{self.name}: addresses have shape {tuple(addresses.shape)} on "
                f"{addresses.device}, expected contiguous [ranks >= 1] on {device}"
            )

    def warm_up(
        self, shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> list[str]:
        """Compile what calls on rows of these shapes will need, so that no training step has to.

        Args:
            shapes: (rows, elements of a row) of the calls to come.
            dtypes: Dtypes of the values.
            device: Where they will be.

        Returns:
            A line for each kernel and how long it took; none where nothing is compiled.
        """
        return []

    def encode(self, x: Tensor) -> Tensor:
        """Encode ``x`` of any shape, flattened, into one payload: uint8 [payload_bytes(n)]."""
        return self.encode_rows(x.reshape(1, -1))[0]

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decode one payload, uint8 [payload_bytes(n)], to a tensor of ``shape`` and ``dtype``.

        Raises:
            TypeError: If the payload is not uint8 or ``dtype`` is not FP32, BF16 or FP16.
            ValueError: If the payload has another size than ``shape`` asks for.
        """
        if payload.dim() != 1:
            raise ValueError(
                f"{self.name}: a payload has one dimension, found shape {tuple(payload.shape)}"
            )
        numel = prod(shape)
        return self.decode_rows(payload.unsqueeze(0), numel, dtype).reshape(tuple(shape))

    def check_values(self, x: Tensor) -> None:
        """Refuse what ``encode_rows`` cannot encode, with what was found and what is allowed."""
        if x.dtype not in VALUE_DTYPES:  # the message costs more than all checks
            self.check_dtype(x.dtype, f"a tensor of shape {tuple(x.shape)}")
        if x.dim() != 2:
            raise ValueError(
                f"{self.name}: encode_rows takes a [rows, numel] tensor, "
                f"found shape {tuple(x.shape)}"
            )

    def check_dtype(self, dtype: torch.dtype, what: str) -> None:
        """Refuse any ``dtype`` but FP32, BF16 and FP16; ``what`` says where it was found."""
        if dtype not in VALUE_DTYPES:
            allowed = ", ".join(str(d) for d in VALUE_DTYPES)
            raise TypeError(f"{self.name}: {what} has dtype {dtype}, allowed are {allowed}")

    def check_payloads(self, payloads: Tensor, numel: int) -> None:
        """Refuse payloads that are not uint8 [rows, payload_bytes(numel)] with rows >= 1."""
        if numel < 0:
            raise ValueError(f"{self.name}: numel is {numel}, allowed is 0 or more")
        if payloads.dtype != torch.uint8:
            raise TypeError(
                f"{self.name}: payloads of shape {tuple(payloads.shape)} have dtype "
                f"{payloads.dtype}, allowed is torch.uint8"
            )
        expected = self.payload_bytes(numel)
        if payloads.dim() != 2 or payloads.shape[0] < 1 or payloads.shape[1] != expected:
            raise ValueError(
                f"{self.name}: payloads have shape {tuple(payloads.shape)}, expected "
                f"[rows >= 1, {expected} bytes] for {numel} elements"
            )

    def check_out(
        self,
        out: Tensor | None,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> None:
        """Refuse an ``out`` that is not contiguous, of ``shape``, one of ``dtypes``, on ``device``.

        Raises:
            TypeError: If the dtype is another.
            ValueError: If anything else is.
        """
        if out is None:
            return
        right_place = out.shape == shape and out.device == device and out.is_contiguous()
        if out.dtype in dtypes and right_place:
            return
        found = f"{self.name}: out is {out.dtype}{list(out.shape)} on {out.device}"
        if out.dtype not in dtypes:
            raise TypeError(f"{found}, allowed are {', '.join(map(str, dtypes))}")
        raise ValueError(f"{found}, expected contiguous {list(shape)} on {device}")


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """Return ``result``, or ``out`` with it, rounded to its dtype."""
    return result if out is None else out.copy_(result)
