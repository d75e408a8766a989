"""What a codebook learns from in one step: counts, sums, candidates, and the sample at its start.

All of it is summed over the replicas by the caller as one FP32 vector; from the sum each replica
computes the same. Samples and candidates go the same way: each of their rows belongs to one
replica, the others give zeros, so that their sum is exact.
"""

import torch
from torch import Tensor

from megatron_taco.boundaries.codebooks import k_means, tally
from megatron_taco.boundaries.random import random_below, stream_key
from megatron_taco.boundaries.rvq_settings import RvqSettings

Shape = tuple[int, int, int, int]


class Statistics:
    """The accumulators of one step; nothing here outlives a step.

    Args:
        settings: Of the quantiser.
        shape: Of its tables, (R, G, K, w).
        seed: Of the run.
        boundary: Number of the boundary.

    Attributes:
        micro_batches: Micro-batches added.
    """

    def __init__(self, settings: RvqSettings, shape: Shape, seed: int, boundary: int) -> None:
        self.settings, self.shape = settings, shape
        self.seed, self.boundary = seed, boundary
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.micro_batches = 0
        self._counts: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._candidates: list[Tensor] = []
        self._sample: Tensor | None = None

    def add(self, place: int, codes: Tensor, vectors: Tensor, weights: Tensor, step: int) -> None:
        """Add round ``place`` of a micro-batch; the first one also gives the candidates.

        Args:
            place: Number of the round.
            codes: int64 [n, G].
            vectors: What the codes stand for, FP32 [n, G, w].
            weights: FP32 [n], 0 for tokens that do not count.
            step: Number of the step.
        """
        counts, sums = tally(codes, vectors, weights, self.shape[2])
        if len(self._counts) > place:
            self._counts[place].add_(counts)
            self._sums[place].add_(sums)
            return
        self._counts.append(counts)
        self._sums.append(sums)
        rows = self._choose("candidates", self.settings.candidates, len(vectors), step, codes)
        self._candidates.append(vectors[rows].contiguous())

    def observe(self, z: Tensor, step: int) -> None:
        """Take the sample from FP32 [n, r], once a step; what is not finite becomes zero."""
        if self._sample is None:
            rows = self._choose("sample", self.settings.sample, len(z), step, z)
            self._sample = z[rows].nan_to_num(0.0, 0.0, 0.0)

    def sample(self, step: int, replica: int, replicas: int) -> Tensor:
        """Return this replica's rows of the sample, zeros elsewhere: FP32 [sample * r].

        Raises:
            ValueError: If no micro-batch was seen.
        """
        if self._sample is None:
            raise ValueError(f"rvq of boundary {self.boundary}: step {step} saw no micro-batch")
        return _own_rows(self._sample, replica, replicas).reshape(-1)

    def vector(self, step: int, replica: int, replicas: int) -> Tensor:
        """Return [counts | sums | candidates], flat FP32.

        Raises:
            ValueError: If no micro-batch was seen.
        """
        if not self._counts:
            raise ValueError(f"rvq of boundary {self.boundary}: step {step} saw no micro-batch")
        candidates = (_own_rows(each, replica, replicas) for each in self._candidates)
        parts = (*self._counts, *self._sums, *candidates)
        return torch.cat([part.reshape(-1) for part in parts])

    def first_table(self, reduced: Tensor) -> tuple[Tensor, Tensor]:
        """Make the first table from the summed sample: FP32 [R, G, K, w], counts [R, G, K]."""
        rounds, groups, codes, width = self.shape
        return k_means(
            reduced.view(-1, groups * width),
            groups,
            rounds,
            codes,
            self.settings.iterations,
            stream_key("k-means", self.seed, self.boundary),
        )

    def update(self, counts: Tensor, sums: Tensor, reduced: Tensor) -> None:
        """Move running counts [R, G, K] and sums [R, G, K, w] in place; replace dead codes.

        Args:
            counts: Running counts.
            sums: Running sums.
            reduced: What ``vector`` returned, summed over the replicas.
        """
        rounds, groups, _, width = self.shape
        limit = self.settings.candidates
        step_counts, step_sums, candidates = reduced.split(
            [counts.numel(), sums.numel(), rounds * limit * groups * width]
        )
        gain = 1.0 - self.settings.decay
        counts.mul_(self.settings.decay).add_(step_counts.view(counts.shape), alpha=gain)
        sums.mul_(self.settings.decay).add_(step_sums.view(sums.shape), alpha=gain)
        mean = counts.mean(2, keepdim=True)
        dead = counts < self.settings.dead * mean
        rank = dead.long().cumsum(2) - 1
        replaced = dead & (rank < limit)
        rows = candidates.view(rounds, limit, groups, width).transpose(1, 2)
        index = rank.clamp(0, limit - 1).unsqueeze(3).expand(self.shape)
        fresh = rows.gather(2, index)
        # A replaced code starts with a tenth of the mean use: the batch soon outweighs it.
        start = (0.1 * mean).expand_as(counts)
        counts.copy_(torch.where(replaced, start, counts))
        sums.copy_(torch.where(replaced.unsqueeze(3), fresh * start.unsqueeze(3), sums))

    def _choose(self, purpose: str, count: int, tokens: int, step: int, like: Tensor) -> Tensor:
        """Choose ``count`` of a micro-batch's tokens, with repetition: int64 [count]."""
        key = stream_key(purpose, self.seed, step, self.boundary)
        return random_below(key, count, tokens, like.device)


def _own_rows(rows: Tensor, replica: int, replicas: int) -> Tensor:
    """Zero the rows of other replicas: row i belongs to replica i mod replicas."""
    mine = torch.arange(len(rows), device=rows.device) % replicas == replica
    return rows * mine.view(-1, *[1] * (rows.dim() - 1)).to(rows.dtype)
