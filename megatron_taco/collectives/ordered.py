"""An exact sum over the ranks of a group in rank order, the same bits on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def ordered_all_reduce_(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over the group in place, in the order of its ranks.

    Each rank sums a slice and all gather the sums: as many bytes as a ring all-reduce, whose order
    depends on the algorithm that the library happens to choose.

    Args:
        tensor: contiguous, of any shape and one of torch's floating-point dtypes.
        group: its ranks hold tensors of one shape.
    """
    ranks = group.size()
    if ranks == 1 or not tensor.numel():
        return
    flat = tensor.view(-1)
    width = -(-flat.numel() // ranks)
    padded = flat.new_zeros(width * ranks)
    padded[: flat.numel()] = flat
    slices = torch.empty_like(padded)
    dist.all_to_all_single(slices, padded, group=group)
    total, *others = slices.view(ranks, width).unbind()
    total = total.clone()
    for other in others:
        total += other
    dist.all_gather_into_tensor(padded, total, group=group)
    flat.copy_(padded[: flat.numel()])
