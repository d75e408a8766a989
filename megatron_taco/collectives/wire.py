"""The two messages that every compressed collective is made of, both of ``uint8``.

The buffers are the caller's, so that a collective needs two of them at most.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def exchange(received: Tensor, payloads: Tensor, group: ProcessGroup, async_op: bool) -> Any:
    """All-to-all: sends row ``r`` to rank ``r`` of the group.

    Args:
        received: ``uint8 [P, ...]``, contiguous; row ``r`` comes from rank ``r``.
        payloads: The same shape, contiguous.
        group: The group, of P ranks.
        async_op: Whether to return before it is done.

    Returns:
        torch's handle (None if not async).
    """
    return dist.all_to_all_single(
        received.view(-1), payloads.view(-1), group=group, async_op=async_op
    )


def gather(rows: Tensor, group: ProcessGroup, async_op: bool) -> Any:
    """All-gather in place: this rank's row goes to all others, and theirs come here.

    Two ranks swap their rows by a send and a receive: over sockets NCCL's all-gather took 1.5
    times as long (docs/decisions.md).

    Args:
        rows: ``uint8 [P, ...]``, contiguous; row ``r`` is that of rank ``r``.
        group: The group, of P ranks.
        async_op: Whether to return before it is done.

    Returns:
        torch's handle (None if not async).
    """
    rank = group.rank()
    mine = rows[rank].view(-1)
    if group.size() != 2:
        return dist.all_gather_into_tensor(rows.view(-1), mine, group=group, async_op=async_op)
    splits = [0, 0]
    splits[1 - rank] = mine.numel()
    return dist.all_to_all_single(
        rows[1 - rank].view(-1),
        mine,
        output_split_sizes=splits,
        input_split_sizes=splits,
        group=group,
        async_op=async_op,
    )
