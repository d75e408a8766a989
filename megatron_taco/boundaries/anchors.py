"""Anchors: a vector for every token, subtracted before the projection and added after it.

A table belongs to a *segment*, the layers between two boundaries: it serves to receive at the
segment's start and to send at its end. Tables of different segments are independent.
Token ids are [b, s], as the model gets them; activations and anchors are [s, b, d].
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_taco.boundaries.random import normal, stream_key
from megatron_taco.boundaries.scatter import segment_sum
from megatron_taco.boundaries.state import FixedPrecision
from megatron_taco.boundaries.stiefel import haar

ANCHOR_KINDS = ("none", "static", "full", "factorised")
_CHUNK = 1 << 20


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = (table.shape[0], table.dtype)
        return table.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        count, dtype = ctx.table
        return segment_sum(gradient, ids, count).to(dtype), None


def look_up(table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of ``table`` [V, c] for ``ids`` int64 [b, s]: [s, b, c].

    The gradient of the table is summed in FP32 in a fixed order and rounded to the table's dtype
    once.

    Raises:
        ValueError: If ``ids`` is not int64 [b, s].
    """
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise ValueError(
            f"anchors: token ids are {ids.dtype}{list(ids.shape)}, expected int64 [b, s]"
        )
    rows: Tensor = _LookUp.apply(table, ids.t().reshape(-1))
    return rows.view(ids.shape[1], ids.shape[0], table.shape[1])


class Anchor(nn.Module, ABC):
    """What one segment adds to and subtracts from the tokens at its boundaries."""

    @abstractmethod
    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the anchors of ``ids`` int64 [b, s]: [s, b, d] of ``dtype``."""

    @property
    def trainable(self) -> bool:
        """Whether the table is a parameter."""
        return any(True for _ in self.parameters())

    def start_from_embedding(self, weight: Tensor, first: int = 0) -> None:
        """Begin at the token embedding, as far as this kind can represent it.

        Args:
            weight: Rows of the embedding [n, d].
            first: Number of the first of them; rows that are not given stay as they are.

        Raises:
            ValueError: If this kind has nothing to set, or there are no such rows.
        """
        raise ValueError(f"{type(self).__name__} cannot start from the embedding")


class StaticAnchor(Anchor):
    """A fixed Gaussian table V x d, the same for all segments (Subspace Networks).

    Not saved: it is made again from the seed. Memory: V * d elements.

    Args:
        vocab: Rows V.
        hidden: Columns d.
        seed: Of the run.
        std: Standard deviation; 1 in the published code.
    """

    table: Tensor

    def __init__(self, vocab: int, hidden: int, seed: int, std: float = 1.0) -> None:
        super().__init__()
        # A token's row does not depend on how many rows the vocabulary is padded to.
        key = stream_key("static anchors", seed, hidden)
        table = torch.empty(vocab * hidden)
        for at in range(0, table.numel(), _CHUNK):
            part = table[at : at + _CHUNK]
            part.copy_(normal(key, (part.numel(),), start=at) * std)
        self.register_buffer("table", table.view(vocab, hidden), persistent=False)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the table's rows."""
        return look_up(self.table, ids).to(dtype)


class FullAnchor(Anchor):
    """A trainable table V x d, zero at first: an ordinary parameter."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab, hidden))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the table's rows."""
        return look_up(self.table, ids).to(dtype)

    def start_from_embedding(self, weight: Tensor, first: int = 0) -> None:
        """Copy ``weight`` [n, d] into the rows from ``first`` on."""
        _check_embedding(weight, first, (self.table.shape[0], self.table.shape[1]))
        with torch.no_grad():
            self.table[first : first + len(weight)] = weight


class FactorisedAnchor(Anchor, FixedPrecision):
    """E P: a trainable table E [V, r] times a fixed P [r, d] with orthonormal rows (MAPL).

    E is an ordinary parameter and zero at first; P is drawn from the seed, its own for every
    segment, FP32 and saved (QR is not the same on every machine).

    Args:
        vocab: Rows V of E.
        hidden: Columns d of P.
        rank: Inner dimension r, at most d.
        seed: Of the run.
        segment: Number of the segment.
    """

    basis: Tensor

    def __init__(self, vocab: int, hidden: int, rank: int, seed: int, segment: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab, rank))
        basis = haar(hidden, rank, seed, segment, purpose="anchor basis").t().contiguous()
        self.register_buffer("basis", basis)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return E[ids] P, the product in ``dtype``."""
        return torch.matmul(look_up(self.table, ids).to(dtype), self.basis.to(dtype))

    def start_from_embedding(self, weight: Tensor, first: int = 0) -> None:
        """Set rows of E to ``weight`` P': the anchor is the embedding projected on P's rows."""
        _check_embedding(weight, first, (self.table.shape[0], self.basis.shape[1]))
        with torch.no_grad():
            rows = weight.to(self.basis) @ self.basis.t()
            self.table[first : first + len(weight)] = rows.to(self.table.dtype)


def build_anchor(
    kind: str, vocab: int, hidden: int, rank: int, seed: int, segment: int, std: float = 1.0
) -> Anchor | None:
    """Return the anchors of one segment, None for ``none``.

    Args:
        kind: none, static, full or factorised.
        vocab: Size of the padded vocabulary V.
        hidden: Size of the activations d.
        rank: Inner dimension of factorised anchors.
        seed: Of the run.
        segment: Number of the segment, 0 before the first boundary.
        std: Of static anchors.

    Raises:
        ValueError: If the kind or the vocabulary is not allowed.
    """
    if kind not in ANCHOR_KINDS:
        raise ValueError(f"anchors is {kind!r}, allowed are {', '.join(ANCHOR_KINDS)}")
    if kind == "none":
        return None
    if vocab < 1:
        raise ValueError(f"anchors {kind!r} need the vocabulary, found {vocab} tokens")
    if kind == "static":
        return StaticAnchor(vocab, hidden, seed, std)
    if kind == "full":
        return FullAnchor(vocab, hidden)
    return FactorisedAnchor(vocab, hidden, rank, seed, segment)


def _check_embedding(weight: Tensor, first: int, shape: tuple[int, int]) -> None:
    rows, hidden = shape
    if weight.dim() != 2 or weight.shape[1] != hidden or not 0 <= first <= rows - len(weight):
        raise ValueError(
            f"anchors: the embedding is {list(weight.shape)} from row {first}, "
            f"expected rows of {list(shape)}"
        )
