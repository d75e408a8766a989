"""The two messages that every compressed collective is made of, both of ``uint8``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def exchange(payloads: Tensor, group: ProcessGroup, async_op: bool) -> tuple[Tensor, Any]:
    """All-to-all: sends row ``r`` to rank ``r`` of the group.

    Args:
        payloads: ``uint8 [P, b]``, contiguous.
        group: The group, of P ranks.
        async_op: Whether to return before it is done.

    Returns:
        ``uint8 [P, b]``, row ``r`` from rank ``r``, and torch's handle (None if not async).
    """
    received = torch.empty_like(payloads)
    handle = dist.all_to_all_single(
        received.view(-1), payloads.view(-1), group=group, async_op=async_op
    )
    return received, handle


def gather(payload: Tensor, group: ProcessGroup, async_op: bool) -> tuple[Tensor, Any]:
    """All-gather: sends ``payload`` to every rank of the group.

    Args:
        payload: ``uint8 [b]``, contiguous.
        group: The group, of P ranks.
        async_op: Whether to return before it is done.

    Returns:
        ``uint8 [P, b]``, row ``r`` from rank ``r``, and torch's handle (None if not async).
    """
    size = group.size()
    gathered = payload.new_empty(size * payload.numel())
    handle = dist.all_gather_into_tensor(gathered, payload, group=group, async_op=async_op)
    return gathered.view(size, payload.numel()), handle
