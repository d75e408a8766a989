"""All-reduce by direct peer reads: nothing is sent, every rank reads its peers' payloads.

Each rank encodes into memory that its peers can read; after a barrier one kernel reads the P
payloads where they lie and writes the sum. One lossy step and the bits of one_shot.py, whose
(P-1)·N bytes are read instead of sent, with no copy of them.

All of it is launched at once, on the current stream: while the kernel reads, the device cannot do
much else, so an async call hides nothing (peer_buffer.py says what else would follow).
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.peer_buffer import PeerBuffer
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.compressors import Compressor


class Launched:
    """The handle of what is on a CUDA stream already, for streams that it is awaited on."""

    def __init__(self, device: torch.device) -> None:
        """Remembers what the device's current stream has got to do so far."""
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Makes the current stream wait; the barrier's timeout is that of the group."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


def peer_read(
    flat: Tensor,
    buffer: PeerBuffer,
    compressor: Compressor,
    on_payload: OnPayload | None,
    async_op: bool,
) -> Chunk:
    """Sums one chunk, ``flat`` [n], contiguous, in place."""
    numel = flat.numel()
    slot = buffer.take(compressor.payload_bytes(numel))
    mine = slot.mine.view(1, -1)
    compressor.encode_rows(flat.view(1, numel), out=mine)
    if on_payload is not None:
        on_payload(mine, numel)
    slot.barrier()
    compressor.decode_sum_peers(slot.addresses, numel, out=flat)
    yield Launched(flat.device) if async_op and flat.is_cuda else None
