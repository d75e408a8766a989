"""What turns the tensor that crosses a boundary into bytes: the interface, and the plain ones.

Wire bytes of n values in blocks of B (one message, no padding when B divides n):

    none      n * itemsize       the tensor's own bytes
    int8      n * (1 + 4 / B)    symmetric, FP32 scale
    e4m3      n * (1 + 4 / B)
    int4      n * (1/2 + 4 / B)

B is ``block`` (256 unless given), or the largest allowed one that divides the rank, so that a
block lies within a token; a rank which none divides has blocks of 32 that run across tokens.
"""

from abc import ABC, abstractmethod
from math import prod

import torch
from torch import Tensor

from megatron_taco.compressors import Compressor, Taco
from megatron_taco.compressors.base import VALUE_DTYPES
from megatron_taco.compressors.taco import BLOCKS

BLOCKWISE = ("int8", "int4", "e4m3")


class Quantizer(ABC):
    """One direction of one boundary, tensor to bytes and back.

    ``encode`` and ``decode`` are the code. ``pack`` and ``unpack`` are a message between two
    stages, ``cross`` is both in one process; they differ from the code only for a quantiser that
    learns. A message's size follows from shape, dtype and the quantiser's phase alone.
    """

    @abstractmethod
    def encoded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the size of ``encode``'s result for a tensor [s, b, r]."""

    @abstractmethod
    def encode(self, x: Tensor, learn: bool = False) -> Tensor:
        """Encode [s, b, r]: uint8 [encoded_bytes], contiguous; ``learn``: take statistics."""

    @abstractmethod
    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode to a new tensor of ``shape`` and ``dtype``."""

    def message_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, learn: bool) -> int:
        """Return the size of a message; ``learn`` as in ``pack``."""
        return self.encoded_bytes(shape, dtype)

    def pack(self, x: Tensor, learn: bool) -> Tensor:
        """Make the message for [s, b, r]: uint8 [message_bytes]; ``learn`` is true in training."""
        return self.encode(x, learn)

    def unpack(
        self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype, learn: bool
    ) -> Tensor:
        """Read a message: a tensor of ``shape`` and ``dtype``."""
        self.check(message, self.message_bytes(shape, dtype, learn))
        return self.decode(message, shape, dtype)

    def cross(self, x: Tensor, learn: bool) -> Tensor:
        """Return what would arrive of ``x``, in place."""
        return self.decode(self.encode(x, learn), tuple(x.shape), x.dtype)

    def check(self, message: Tensor, expected: int) -> None:
        """Refuse a message that is not uint8 [expected].

        Raises:
            ValueError: With what was found.
        """
        if message.dtype != torch.uint8 or tuple(message.shape) != (expected,):
            raise ValueError(
                f"{type(self).__name__}: a message is {message.dtype}{list(message.shape)}, "
                f"expected torch.uint8[{expected}]"
            )


class Plain(Quantizer):
    """The tensor's own bytes."""

    def encoded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return n * itemsize."""
        return prod(shape) * dtype.itemsize

    def encode(self, x: Tensor, learn: bool = False) -> Tensor:
        """View the values as bytes; the payload shares memory with a contiguous ``x``."""
        return x.detach().contiguous().view(-1).view(torch.uint8)

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Copy the bytes into a new tensor."""
        out = torch.empty(shape, dtype=dtype, device=payload.device)
        out.view(-1).view(torch.uint8).copy_(payload)
        return out

    def cross(self, x: Tensor, learn: bool) -> Tensor:
        """Return ``x`` itself."""
        return x


class Blockwise(Quantizer):
    """Any compressor of this package, over the flattened tensor; a NaN's block decodes to NaN."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor

    def encoded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the compressor's payload for n values."""
        self.compressor.check_dtype(dtype, "what crosses a boundary")
        return self.compressor.payload_bytes(prod(shape))

    def encode(self, x: Tensor, learn: bool = False) -> Tensor:
        """Encode the values in memory order."""
        return self.compressor.encode(x.detach())

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode the values."""
        return self.compressor.decode(payload, shape, dtype)


def is_plain(quantizer: Quantizer) -> bool:
    """Whether the tensor crosses as it is, so that nothing need be done in place."""
    return type(quantizer) is Plain


def blockwise(
    kind: str, rank: int, block: int | None = None, rotation: str = "hadamard"
) -> Blockwise:
    """Return an element-wise quantiser for tensors [s, b, rank].

    Args:
        kind: int8, int4 or e4m3.
        rank: Coordinates of a token.
        block: Values that share a scale; chosen as the module says if None.
        rotation: hadamard or none, over a block.

    Raises:
        ValueError: If an argument has a value that is not allowed.
    """
    if kind not in BLOCKWISE:
        raise ValueError(f"quantizer is {kind!r}, allowed are {', '.join(BLOCKWISE)}")
    if block is None:
        fitting = [size for size in BLOCKS if size <= 256 and rank % size == 0]
        block = max(fitting, default=BLOCKS[0])
    return Blockwise(Taco(kind, block, rotation, scales="merged_fp32"))


def check_values(x: Tensor, what: str) -> None:
    """Refuse anything but FP32, BF16 and FP16.

    Raises:
        TypeError: With the dtype found.
    """
    if x.dtype not in VALUE_DTYPES:
        allowed = ", ".join(map(str, VALUE_DTYPES))
        raise TypeError(f"{what}: dtype is {x.dtype}, allowed are {allowed}")
