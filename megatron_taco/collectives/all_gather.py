"""Compressed all-gather: everyone decodes the same bytes, its own slice included.

One lossy step. A rank replaces even its own slice by what the others see of it: ranks that
computed on different values would drift apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import checks, wire
from megatron_taco.collectives.all_reduce import OnPayload
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor


def all_gather(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup,
    compressor: Compressor,
    async_op: bool = False,
    on_payload: OnPayload | None = None,
) -> Work | None:
    """Gathers the ``input`` of all ranks of ``group`` in ``output``, in rank order.

    Args:
        output: Gets the P slices one after the other in row-major order: P times the elements of
            ``input``, same dtype. ``input`` may be a view of it.
        input: FP32, BF16 or FP16, this rank's slice; the same shape and dtype on all ranks.
        group: The process group, of P ranks.
        compressor: Encodes what is sent.
        async_op: Return a handle; ``output`` is ready once its ``wait`` has returned.
        on_payload: Sees the payload that this rank encoded.

    Returns:
        The handle if ``async_op``, else None.

    Raises:
        TypeError: A dtype cannot be compressed or they differ, or ``group`` is not a group of
            this rank.
        ValueError: The element counts do not fit the group, or the devices differ.
    """
    size = checks.group_size(group)
    checks.check_pair(output, input, "output", size)
    numel = input.numel()
    with torch.no_grad():
        if size == 1 or numel == 0:
            output.detach().copy_(input.reshape(output.shape))
            return Work.done() if async_op else None
        payload = compressor.encode(input.detach())
        if on_payload is not None:
            on_payload(payload.view(1, -1), numel)
        gathered, handle = wire.gather(payload, group, async_op)

    def finish() -> None:
        rows = compressor.decode_rows(gathered, numel, output.dtype)
        output.detach().copy_(rows.view(output.shape))

    work = Work(handle, finish, payload, gathered)
    if async_op:
        return work
    work.wait()
    return None
