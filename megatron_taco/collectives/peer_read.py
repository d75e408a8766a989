"""All-reduce by direct peer reads: nothing is sent, every rank reads its peers' payloads.

Each rank encodes into memory that its peers can read; after a barrier one kernel reads the P
payloads where they lie and writes the sum. One lossy step and the bits of one_shot.py, whose
(P-1)·N bytes are read instead of sent, with no copy of them.

All of it is launched at once, on the current stream: while the kernel reads, the device cannot do
much else, so an async call hides nothing (peer_buffer.py says what else would follow).
"""

from __future__ import annotations

from torch import Tensor

from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.peer_buffer import PeerBuffer
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.compressors import Compressor


def peer_read(
    flat: Tensor, buffer: PeerBuffer, compressor: Compressor, on_payload: OnPayload | None
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
    yield None
