"""Encoding a chunk as equal slices of whole blocks, and decoding it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_taco.compressors import Compressor


def encode_slices(flat: Tensor, rows: int, width: int, compressor: Compressor) -> Tensor:
    """Encodes ``flat`` as ``rows`` slices; zeros fill the end.

    Args:
        flat: ``[n]``, contiguous, n <= rows * width.
        rows: Number of slices.
        width: Elements of a slice.
        compressor: Encodes.

    Returns:
        ``uint8 [rows, payload_bytes(width)]``.
    """
    payloads = torch.empty(
        rows, compressor.payload_bytes(width), dtype=torch.uint8, device=flat.device
    )
    full = flat.numel() // width
    if full:
        compressor.encode_rows(flat[: full * width].view(full, width), out=payloads[:full])
    if full < rows:
        rest = flat.new_zeros(rows - full, width)
        rest.view(-1)[: flat.numel() - full * width] = flat[full * width :]
        compressor.encode_rows(rest, out=payloads[full:])
    return payloads


def decode_slices(payloads: Tensor, width: int, flat: Tensor, compressor: Compressor) -> None:
    """Undoes :func:`encode_slices`: decodes ``payloads`` into ``flat``."""
    full = flat.numel() // width
    if full:
        out = flat[: full * width].view(full, width)
        compressor.decode_rows(payloads[:full], width, flat.dtype, out=out)
    rest = flat[full * width :]
    if rest.numel():
        rows = compressor.decode_rows(payloads[full:], width, flat.dtype)
        rest.copy_(rows.view(-1)[: rest.numel()])
