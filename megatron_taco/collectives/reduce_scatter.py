"""Compressed reduce-scatter: an all-to-all of encoded slices, summed where they arrive.

One lossy step: the sum stays on the rank that made it, so it is never encoded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import checks, wire
from megatron_taco.collectives.all_reduce import OnPayload
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup,
    compressor: Compressor,
    async_op: bool = False,
    on_payload: OnPayload | None = None,
) -> Work | None:
    """Sums ``input`` over the ranks of ``group`` and leaves slice ``r`` of it on rank ``r``.

    Args:
        output: Gets this rank's slice: a P-th of the elements of ``input``, same dtype. It may be
            a view of ``input``. The sum is made in FP32 and rounded to this dtype once.
        input: FP32, BF16 or FP16, P equal slices one after the other in row-major order.
        group: The process group, of P ranks.
        compressor: Encodes what is sent.
        async_op: Return a handle; ``output`` is ready once its ``wait`` has returned.
        on_payload: Sees the payloads that this rank encoded.

    Returns:
        The handle if ``async_op``, else None.

    Raises:
        TypeError: A dtype cannot be compressed or they differ, or ``group`` is not a group of
            this rank.
        ValueError: The element counts do not fit the group, or the devices differ.
    """
    size = checks.group_size(group)
    checks.check_pair(output, input, "input", size)
    numel = output.numel()
    with torch.no_grad():
        if size == 1 or numel == 0:
            output.detach().copy_(input.reshape(output.shape))
            return Work.done() if async_op else None
        payloads = compressor.encode_rows(input.detach().reshape(size, numel))
        if on_payload is not None:
            on_payload(payloads, numel)
        received, handle = wire.exchange(payloads, group, async_op)

    def finish() -> None:
        total = compressor.decode_sum(received, numel)
        output.detach().copy_(total.view(output.shape))

    work = Work(handle, finish, payloads, received)
    if async_op:
        return work
    work.wait()
    return None
