"""Hierarchical all-reduce, for groups of M nodes with L ranks each: few bytes between nodes.

The chunk is cut into L·M pieces. Inside each node an all-to-all brings M pieces of all L ranks to
one, which sums and encodes each again. Then the M ranks with the same place in their nodes do the
same with one piece each, and hand their encoded sums out among each other; at last an all-gather
inside the node. Each rank sends 2(M-1) pieces between nodes and 2(L-1)·M inside; a two-shot
all-reduce sends 2(M-1)·L pieces between nodes, L times as many.

Three lossy steps (the values, the sums of a node, the sums of all), so E4M3 on Gaussian data is
4.5% off in relative RMS; two-shot is 3.7% off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_taco.collectives import wire
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.nodes import NodeGroups
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.collectives.slices import decode_slices, encode_slices
from megatron_taco.collectives.traffic import slice_elements
from megatron_taco.compressors import Compressor


def hierarchical(
    flat: Tensor,
    nodes: NodeGroups,
    compressor: Compressor,
    on_payload: OnPayload | None,
    async_op: bool,
) -> Chunk:
    """Sums one chunk, ``flat`` [n], contiguous, in place."""
    local, across = nodes.local, nodes.across
    size, count = local.size(), across.size()
    width = slice_elements(flat.numel(), size * count, compressor.block)
    payloads = encode_slices(flat, size * count, width, compressor)
    if on_payload is not None:
        on_payload(payloads, width)
    pieces = payloads.view(size, count, -1)
    received = torch.empty_like(pieces)
    yield wire.exchange(received, pieces, local, async_op)
    # As in the two-shot, each message's buffer takes what comes after it has been sent.
    mine = pieces[local.rank()]
    for piece in range(count):
        compressor.reduce_encode(received[:, piece], width, out=mine[piece])
    yield wire.exchange(received[0], mine, across, async_op)
    compressor.reduce_encode(received[0], width, out=mine[across.rank()])
    yield wire.gather(mine, across, async_op)
    yield wire.gather(pieces, local, async_op)
    decode_slices(payloads, width, flat, compressor)
