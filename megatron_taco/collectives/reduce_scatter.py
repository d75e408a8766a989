"""Compressed reduce-scatter: an all-to-all of encoded slices, summed where they arrive.

One lossy step: the sum stays on the rank that made it, so it is never encoded.
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


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup,
    compressor: Compressor,
    chunks: int | None = None,
    async_op: bool = False,
    on_payload: OnPayload | None = None,
) -> Work | None:
    """Sums ``input`` over the ranks of ``group`` and leaves slice ``r`` of it on rank ``r``.

    Args:
        output: Gets this rank's slice: a P-th of the elements of ``input``, same dtype. It may be
            a view of ``input``. The sum is made in FP32 and rounded to this dtype once.
        input: FP32, BF16 or FP16, P equal slices one after the other in row-major order. It is
            encoded when the call returns.
        group: The process group, of P ranks.
        compressor: Encodes what is sent.
        chunks: Parts that travel one after the other; by default one.
        async_op: Return a handle; ``output`` is ready once its ``wait`` has returned.
        on_payload: Sees the payloads that this rank encoded, chunk by chunk.

    Returns:
        The handle if ``async_op``, else None.

    Raises:
        TypeError: A dtype cannot be compressed or they differ, or ``group`` is not a group of
            this rank.
        ValueError: The element counts do not fit the group, the devices differ, or ``chunks`` is
            below 1.
    """
    size = checks.group_size(group)
    checks.check_pair(output, input, "input", size)
    checks.check_chunks(chunks)
    numel = output.numel()
    with torch.no_grad():
        given = output.detach()
        if size == 1 or numel == 0:
            given.copy_(input.reshape(output.shape))
            return Work.done() if async_op else None
        rows = input.detach().reshape(size, numel)
        flat = given.view(-1) if given.is_contiguous() else given.new_empty(numel)
        cuts = plan(
            numel,
            input.nbytes,
            unit=compressor.block,
            wire_bytes=2 * size * compressor.payload_bytes(numel),
            chunks=chunks,
        )
        overlap = async_op or len(cuts.spans) > 1
        parts = (
            _part(flat[a:b], rows[:, a:b], group, compressor, on_payload, overlap)
            for a, b in cuts.spans
        )

        def done() -> None:
            if not given.is_contiguous():
                given.copy_(flat.view(given.shape))

        # All chunks at once, whatever the depth: the output may be a view of the input.
        return launch.run(parts, len(cuts.spans), done, flat, async_op)


def _part(
    output: Tensor,
    rows: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    on_payload: OnPayload | None,
    async_op: bool,
) -> Chunk:
    """One chunk of each slice: ``rows`` [P, n] of this rank, to ``output`` [n], contiguous."""
    numel = output.numel()
    payloads = compressor.encode_rows(rows)
    if on_payload is not None:
        on_payload(payloads, numel)
    received = torch.empty_like(payloads)
    yield wire.exchange(received, payloads, group, async_op)
    compressor.decode_sum(received, numel, out=output)
