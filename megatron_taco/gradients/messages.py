"""The exact messages that gradient methods are made of, with the bytes that they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Channel:
    """A process group whose traffic is counted.

    Attributes:
        group: The group, of P ranks.
        size: P.
        rank: This rank in the group.
        wire: Bytes that this rank has sent so far; an all-reduce is counted as a ring's.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Takes over nothing but the group; see the class."""
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.wire = 0

    def sum_(self, vector: Tensor) -> Tensor:
        """Sums ``vector`` over the ranks in place; every rank gets the same bits."""
        if self.size > 1 and vector.numel():
            dist.all_reduce(vector, group=self.group)
            self.wire += ring_bytes(vector.numel() * vector.element_size(), self.size)
        return vector

    def mean_(self, vector: Tensor) -> Tensor:
        """Averages ``vector`` over the ranks in place: the sum, divided by P."""
        return self.sum_(vector).div_(self.size)

    def gather(self, vector: Tensor) -> Tensor:
        """Returns the ``vector`` [n] of every rank: [P, n], in rank order."""
        if self.size == 1 or not vector.numel():
            return vector.reshape(1, -1).expand(self.size, -1)
        out = vector.new_empty(self.size * vector.numel())
        dist.all_gather_into_tensor(out, vector.contiguous(), group=self.group)
        self.wire += (self.size - 1) * vector.numel() * vector.element_size()
        return out.view(self.size, -1)

    def gather_uneven(self, vector: Tensor) -> list[Tensor]:
        """Returns the ``vector`` of every rank, of any length each; lengths are sent first."""
        length = torch.tensor([vector.numel()], dtype=torch.int64, device=vector.device)
        lengths = self.gather(length).view(-1).tolist()
        padded = vector.new_zeros(max(lengths))
        padded[: vector.numel()] = vector
        rows = self.gather(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def exchange(self, rows: Tensor) -> Tensor:
        """Sends row r of ``rows`` [P, n] to rank r; returns [P, n], row r from rank r."""
        if self.size == 1 or not rows.numel():
            return rows
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out.view(-1), rows.contiguous().view(-1), group=self.group)
        self.wire += (self.size - 1) * rows.shape[1] * rows.element_size()
        return out


def ring_bytes(total: int, size: int) -> int:
    """Returns what a ring all-reduce of ``total`` bytes makes each of ``size`` ranks send."""
    return -(-2 * (size - 1) * total // size)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Returns all tensors in a row: a new FP32 vector."""
    parts = [tensor.detach().reshape(-1).float() for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def write_back(vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Writes the pieces of ``vector`` into the tensors, rounded to their dtypes once."""
    at = 0
    with torch.no_grad():
        for tensor in tensors.values():
            piece = vector[at : at + tensor.numel()]
            tensor.copy_(piece.view(tensor.shape))
            at += tensor.numel()


def add_at(target: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Adds ``values`` to ``target`` [n] at ``index``, in place; an index may occur repeatedly.

    On CUDA ``index_add_`` adds repeated indices in any order; ``index_put_`` sorts them first.
    """
    if target.is_cuda:
        return target.index_put_((index,), values, accumulate=True)
    return target.index_add_(0, index, values)
