"""Sums of rows that share a key, in a fixed order."""

import torch
from torch import Tensor


def segment_sum(rows: Tensor, keys: Tensor, count: int) -> Tensor:
    """Add up the rows of each key: ``out[k]`` is the sum of ``rows[i]`` over i with keys[i] = k.

    No atomic additions, so the same input gives the same bits: on CUDA ``index_put_`` with
    accumulation sorts the keys first; on CPUs it would add atomically, so there ``index_add_``
    goes through the rows in order.

    Args:
        rows: FP32 or FP64 [n, c]; 16-bit values are summed in FP32.
        keys: int64 [n] in [0, count).
        count: Number of keys.

    Returns:
        FP32 (or FP64) [count, c].
    """
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.float()
    out = rows.new_zeros(count, rows.shape[1])
    if rows.is_cuda:
        return out.index_put_((keys,), rows, accumulate=True)
    return out.index_add_(0, keys, rows)
