"""One-shot all-reduce: every rank sends its payload to all others and sums what it decodes.

One lossy step, one message, (P-1)·N bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import wire
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.compressors import Compressor


def one_shot(
    flat: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    on_payload: OnPayload | None,
    async_op: bool,
) -> Chunk:
    """Sums one chunk, ``flat`` [n], contiguous, in place."""
    numel = flat.numel()
    payloads = torch.empty(
        group.size(), compressor.payload_bytes(numel), dtype=torch.uint8, device=flat.device
    )
    mine = payloads[group.rank()].view(1, -1)
    compressor.encode_rows(flat.view(1, numel), out=mine)
    if on_payload is not None:
        on_payload(mine, numel)
    yield wire.gather(payloads, group, async_op)
    compressor.decode_sum(payloads, numel, out=flat)
