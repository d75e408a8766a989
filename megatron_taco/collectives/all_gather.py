"""Compressed all-gather: everyone decodes the same bytes, its own slice included.

One lossy step. A rank replaces even its own slice by what the others see of it: ranks that
computed on different values would drift apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import checks, launch, wire
from megatron_taco.collectives.chunks import plan
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor


def all_gather(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup,
    compressor: Compressor,
    chunks: int | None = None,
    async_op: bool = False,
    on_payload: OnPayload | None = None,
) -> Work | None:
    """Gathers the ``input`` of all ranks of ``group`` in ``output``, in rank order.

    Args:
        output: Gets the P slices one after the other in row-major order: P times the elements of
            ``input``, same dtype. ``input`` may be a view of it.
        input: FP32, BF16 or FP16, this rank's slice; the same shape and dtype on all ranks. It is
            encoded when the call returns.
        group: The process group, of P ranks.
        compressor: Encodes what is sent.
        chunks: Parts that travel one after the other; by default one.
        async_op: Return a handle; ``output`` is ready once its ``wait`` has returned.
        on_payload: Sees the payload that this rank encoded, chunk by chunk.

    Returns:
        The handle if ``async_op``, else None.

    Raises:
        TypeError: A dtype cannot be compressed or they differ, or ``group`` is not a group of
            this rank.
        ValueError: The element counts do not fit the group, the devices differ, or ``chunks`` is
            below 1.
    """
    size = checks.group_size(group)
    checks.check_pair(output, input, "output", size)
    checks.check_chunks(chunks)
    numel = input.numel()
    with torch.no_grad():
        given = output.detach()
        if size == 1 or numel == 0:
            given.copy_(input.reshape(output.shape))
            return Work.done() if async_op else None
        source = input.detach().reshape(1, numel)
        rows = (given if given.is_contiguous() else torch.empty_like(given).contiguous()).view(
            size, numel
        )
        cuts = plan(
            numel,
            output.nbytes,
            unit=compressor.block,
            wire_bytes=size * compressor.payload_bytes(numel),
            chunks=chunks,
        )
        overlap = async_op or len(cuts.spans) > 1
        parts = (
            _part(rows[:, a:b], source[:, a:b], group, compressor, on_payload, overlap)
            for a, b in cuts.spans
        )

        def done() -> None:
            if not given.is_contiguous():
                given.copy_(rows.view(given.shape))

        # All chunks at once, whatever the depth: the input may be a view of the output.
        return launch.run(parts, len(cuts.spans), done, rows, async_op)


def _part(
    rows: Tensor,
    source: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    on_payload: OnPayload | None,
    async_op: bool,
) -> Chunk:
    """One chunk of each slice: ``source`` [1, n] of this rank, to ``rows`` [P, n]."""
    numel = source.numel()
    payloads = torch.empty(
        group.size(), compressor.payload_bytes(numel), dtype=torch.uint8, device=source.device
    )
    mine = payloads[group.rank()].view(1, -1)
    compressor.encode_rows(source, out=mine)
    if on_payload is not None:
        on_payload(mine, numel)
    yield wire.gather(payloads, group, async_op)
    if rows.is_contiguous():
        compressor.decode_rows(payloads, numel, rows.dtype, out=rows)
    else:
        for payload, row in zip(payloads, rows, strict=True):
            compressor.decode_rows(payload.view(1, -1), numel, row.dtype, out=row.view(1, -1))
