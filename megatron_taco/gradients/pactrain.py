"""PacTrain: the gradients of a pruned model, averaged in compact form (arXiv 2505.18563).

A pruned weight has no gradient (or one that is masked away), so gradients are zero at the same
places on all ranks, step after step. Once every rank knows the mask, the values at its places
travel in a row through an ordinary all-reduce:

    if some rank has a value outside the mask:  mask <- union over ranks of the non-zeros
    c  = g[mask];  c <- mean over ranks of c;  g <- 0;  g[mask] = c

Exact for any gradients; it pays when the mask is small and does not change. Optionally c is
ternary, with one scale t = max|c| a tensor (after TernGrad, arXiv 1705.07878):

    c_i -> t sign(c_i) [u_i < |c_i| / t]        u_i uniform, of (seed, step, tensor, rank, i)

On the wire: a flag; a bitmap of n/8 bytes when the mask changes; 4 bytes a value of the mask
in an all-reduce, or 2 bits a value and 4 bytes a tensor in an all-gather. State: mask (shared).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.compressors.counter_random import key_of, uniform
from megatron_taco.gradients.homomorphic import union_of
from megatron_taco.gradients.messages import flatten, write_back
from megatron_taco.gradients.method import GradientMethod

_MASK = "mask"


class PacTrain(GradientMethod):
    """See this module's docstring."""

    name = "pactrain"

    def __init__(
        self, group: ProcessGroup, *, ternary: bool = False, seed: int = 0, start_step: int = 0
    ) -> None:
        """Starts without a mask.

        Args:
            group: The data-parallel group.
            ternary: Send signs and a scale instead of FP32 values; unbiased, not exact.
            seed: Of the random rounding to signs.
            start_step: First step that is compressed.

        Raises:
            ValueError: ``start_step`` is negative.
        """
        super().__init__(group, start_step=start_step)
        self.ternary = ternary
        self.seed = seed

    def _places(self, values: Tensor) -> Tensor:
        """Returns the mask's places, ascending, which hold all non-zeros of all ranks: int64."""
        mask = self._shared.get(_MASK)
        if mask is None:
            mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
        outside = ((values != 0) & ~mask).any().to(torch.uint8).view(1)
        if self._channel.gather(outside).any():
            mask = torch.zeros_like(mask)
            mask[union_of(values != 0, self._channel)] = True
            self._shared[_MASK] = mask
        return mask.nonzero().view(-1)

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        if not tensors:
            return
        values = flatten(tensors.values())
        places = self._places(values)
        compact = values[places]
        if self.ternary:
            mean = self._ternary_mean(compact, places, tensors, step)
        else:
            mean = self._channel.mean_(compact)
        result = torch.zeros_like(values)
        result[places] = mean
        write_back(result, tensors)

    def _ternary_mean(
        self, compact: Tensor, places: Tensor, tensors: Mapping[str, Tensor], step: int
    ) -> Tensor:
        sizes = torch.tensor([t.numel() for t in tensors.values()], device=compact.device)
        owner = torch.bucketize(places, sizes.cumsum(0), right=True)
        scales = compact.new_zeros(len(tensors))
        scales.scatter_reduce_(0, owner, compact.abs(), "amax")
        key = key_of(self.seed, step, self.name, self._channel.rank)
        u = uniform(compact.numel(), key, compact.device)
        share = compact.abs() / torch.where(scales[owner] > 0, scales[owner], 1.0)
        codes = torch.where(u < share, compact.sign(), 0.0).nan_to_num() + 1  # 0, 1, 2
        fields = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.numel() % 4)).view(-1, 4)
        packed = fields[:, 0] | fields[:, 1] << 2 | fields[:, 2] << 4 | fields[:, 3] << 6
        all_packed, all_scales = self._channel.gather(packed), self._channel.gather(scales)
        total = torch.zeros_like(compact)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=compact.device)
        for rank in range(self._channel.size):
            signs = (all_packed[rank].unsqueeze(1) >> shifts & 3).view(-1)[: codes.numel()]
            total += (signs.float() - 1) * all_scales[rank][owner]
        return total.div_(self._channel.size)
