"""The message between two stages: what a boundary packed, then the token ids as integers.

    forward     [payload bytes][ids: 2 or 4 bytes a token][padding to whole elements]
    backward    [payload bytes][padding to whole elements]

Megatron's communicator sends and receives tensors of the pipeline's dtype, so a message is bytes
seen as elements of that dtype; nothing computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ATTRIBUTE = "_megatron_taco_message"
"""What a tensor that crosses a boundary carries: an :class:`Outgoing` or an :class:`Arrived`."""


@dataclass(frozen=True)
class Outgoing:
    """On the output of a sending half.

    Attributes:
        message: what is to be sent.
        shape: of the tensor before compression, [s, b, d].
    """

    message: Tensor
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Arrived:
    """On the input of a receiving half, whose values are still in the message.

    Attributes:
        message: what is being received; complete once Megatron has waited for it.
    """

    message: Tensor


class MessageForm:
    """Joins payload and ids into a message and takes them apart.

    Args:
        vocab: rows of the padded vocabulary where ids are sent along, else None.
    """

    def __init__(self, vocab: int | None) -> None:
        self._ids_dtype: torch.dtype | None = None
        if vocab is not None:
            # 16 bits, read back as unsigned; torch's own uint16 can do little more than exist.
            self._ids_dtype = torch.int16 if vocab <= 2**16 else torch.int32

    def elements(self, payload_bytes: int, s: int, b: int, dtype: torch.dtype, ids: bool) -> int:
        """Size of a message in elements of ``dtype``.

        Args:
            payload_bytes: what the boundary packs.
            s: positions.
            b: sequences.
            dtype: of the pipeline.
            ids: whether it goes forward, where ids travel along if any do.
        """
        width = self._ids_dtype.itemsize if ids and self._ids_dtype is not None else 0
        return -(-(payload_bytes + s * b * width) // dtype.itemsize)

    def join(self, payload: Tensor, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A message of ``dtype`` from uint8 [n] and ids int64 [b, s].

        Without ids it shares memory with the payload where that fills whole elements.
        """
        parts = [payload]
        if ids is not None and self._ids_dtype is not None:
            parts.append(ids.to(self._ids_dtype).contiguous().view(-1).view(torch.uint8))
        size = sum(part.numel() for part in parts)
        padding = -size % dtype.itemsize
        if padding:
            parts.append(payload.new_zeros(padding))
        whole = torch.cat(parts) if len(parts) > 1 else payload
        return whole.view(dtype)

    def split(
        self, message: Tensor, payload_bytes: int, s: int, b: int, ids: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Payload uint8 [payload_bytes] and ids int64 [b, s], if any, of a message."""
        whole = message.detach().view(torch.uint8)
        payload = whole[:payload_bytes]
        if not ids or self._ids_dtype is None:
            return payload, None
        size = s * b * self._ids_dtype.itemsize
        # A copy, since a view needs an offset of whole ids.
        narrow = whole[payload_bytes : payload_bytes + size].clone().view(self._ids_dtype)
        wide = narrow.to(torch.int64)
        if self._ids_dtype == torch.int16:
            wide &= 0xFFFF
        return payload, wide.view(b, s)
