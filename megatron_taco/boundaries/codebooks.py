"""Residual product quantisation: nearest codes, and k-means to begin with.

Tables are FP32 [R, G, K, w]: R rounds, G groups of w coordinates, K code vectors for each.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_taco.boundaries.random import permutation
from megatron_taco.boundaries.scatter import segment_sum

SCORES = 1 << 26
"""Scores (FP32) that are in memory at a time while codes are assigned."""


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the nearest code, L2, of each vector: int64 [n, G] for x [n, G, w], table [G, K, w].

    The smallest index wins a tie. Maximises x.c - |c|^2 / 2.
    """
    count, groups, _ = x.shape
    codes = torch.empty(count, groups, dtype=torch.int64, device=x.device)
    half = -0.5 * table.square().sum(2).unsqueeze(1)
    turned = table.transpose(1, 2)
    size = max(1, SCORES // (groups * table.shape[1]))
    for at in range(0, count, size):
        scores = torch.baddbmm(half, x[at : at + size].transpose(0, 1), turned)
        codes[at : at + size] = scores.argmax(2).t()
    return codes


def pick(table: Tensor, codes: Tensor) -> Tensor:
    """Return the code vectors [n, G, w] of ``codes`` int64 [n, G] in ``table`` [G, K, w]."""
    return table[torch.arange(table.shape[0], device=table.device), codes]


def assign(z: Tensor, tables: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the rounds: (codes int64 [n, G], the residual [n, G, w] they stand for).

    Args:
        z: FP32 [n, G * w].
        tables: [R, G, K, w].
    """
    residual = z.view(len(z), tables.shape[1], tables.shape[3])
    for table in tables:
        codes = nearest(residual, table)
        yield codes, residual
        residual = residual - pick(table, codes)


def decode(codes: Tensor, tables: Tensor) -> Tensor:
    """Add up the rounds in order: FP32 [n, G * w] from codes int64 [R, n, G]."""
    total = pick(tables[0], codes[0])
    for table, each in zip(tables[1:], codes[1:], strict=True):
        total = total + pick(table, each)
    return total.reshape(total.shape[0], -1)


def tally(codes: Tensor, vectors: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Count and add up the vectors of each code, in a fixed order.

    Args:
        codes: int64 [n, G].
        vectors: FP32 [n, G, w].
        weights: FP32 [n], 1 for tokens that count and 0 for others, whose vectors are finite.
        count: Codes K.

    Returns:
        Counts FP32 [G, K] and sums FP32 [G, K, w].
    """
    tokens, groups, width = vectors.shape
    ones = weights.view(-1, 1, 1).expand(tokens, groups, 1)
    rows = torch.cat([vectors * ones, ones], dim=2).view(-1, width + 1)
    keys = codes + torch.arange(groups, device=codes.device) * count
    totals = segment_sum(rows, keys.view(-1), groups * count).view(groups, count, width + 1)
    return totals[:, :, width].contiguous(), totals[:, :, :width].contiguous()


def k_means(
    sample: Tensor, groups: int, rounds: int, codes: int, iterations: int, key: int
) -> tuple[Tensor, Tensor]:
    """Find tables for ``sample`` FP32 [n, r], n >= codes, a round after the other.

    Each begins with vectors of the sample that ``key`` picks; Lloyd's iterations follow, in which
    an empty cluster moves to one of the vectors that are farthest from their centres.

    Returns:
        Tables FP32 [rounds, groups, codes, r / groups] and counts FP32 [rounds, groups, codes].
    """
    residual = sample.view(len(sample), groups, -1)
    first = permutation(key, len(sample), sample.device)
    weights = torch.ones(len(sample), device=sample.device)
    tables, sizes = [], []
    for step in range(rounds):
        chosen = first.roll(-step * codes)[:codes]
        table = residual[chosen].transpose(0, 1).contiguous()
        for _ in range(iterations):
            found = nearest(residual, table)
            counts, sums = tally(found, residual, weights, codes)
            distance = (residual - pick(table, found)).square().sum(2)
            far = distance.t().topk(codes, dim=1).indices
            table = torch.where(
                (counts > 0).unsqueeze(2),
                sums / counts.clamp_min(1.0).unsqueeze(2),
                _ranked(residual.transpose(0, 1), far, counts == 0),
            )
        found = nearest(residual, table)
        counts, _ = tally(found, residual, weights, codes)
        residual = residual - pick(table, found)
        tables.append(table)
        sizes.append(counts)
    return torch.stack(tables), torch.stack(sizes)


def _ranked(vectors: Tensor, candidates: Tensor, empty: Tensor) -> Tensor:
    """Give the j-th empty cluster of a group its j-th candidate: [G, K, w]."""
    rank = (empty.long().cumsum(1) - 1).clamp_min(0)
    row = candidates.gather(1, rank)
    return vectors.gather(1, row.unsqueeze(2).expand(-1, -1, vectors.shape[2]))
