"""Two-shot all-reduce: the default of TACO's released code.

The chunk is cut into P slices. An all-to-all brings slice ``r`` of every rank to rank ``r``, which
decodes, sums in FP32 in rank order and encodes the sum again; an all-gather hands the encoded sums
out. Two lossy steps, two messages, 2(P-1)/P·N bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import wire
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.collectives.slices import decode_slices, encode_slices
from megatron_taco.collectives.traffic import slice_elements
from megatron_taco.compressors import Compressor


def two_shot(
    flat: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    on_payload: OnPayload | None,
    async_op: bool,
) -> Chunk:
    """Sums one chunk, ``flat`` [n], contiguous, in place."""
    width = slice_elements(flat.numel(), group.size(), compressor.block)
    payloads = encode_slices(flat, group.size(), width, compressor)
    if on_payload is not None:
        on_payload(payloads, width)
    received = torch.empty_like(payloads)
    yield wire.exchange(received, payloads, group, async_op)
    # What was sent is no longer needed: the sums take its place.
    compressor.reduce_encode(received, width, out=payloads[group.rank()])
    yield wire.gather(payloads, group, async_op)
    decode_slices(payloads, width, flat, compressor)
