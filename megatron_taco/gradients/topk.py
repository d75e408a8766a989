"""Top-k with error feedback; the k largest by sorting, or by SIDCo's fitted threshold.

On each rank, tensor by tensor, with the residual e (arXiv 1809.07599; thresholds: sidco.py):

    a   = g + e
    s   = a where |a| is among the largest k = ceil(ratio n), or above the threshold; else 0
    e  <- a - s                       so sent + residual = input, to the bit
    g  <- mean over ranks of s        added in rank order

On the wire: an all-gather of 4 bytes of index and 4 of value for each value sent, all tensors in
one message, preceded by the counts. State: e (local). What is not a number is always sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.gradients import sidco
from megatron_taco.gradients.messages import write_back
from megatron_taco.gradients.method import GradientMethod

LARGEST_INDEX = 2**31 - 1


class TopK(GradientMethod):
    """See this module's docstring."""

    name = "topk"

    def __init__(
        self,
        group: ProcessGroup,
        *,
        ratio: float = 0.01,
        selection: Literal["sort", "sidco"] = "sidco",
        error_feedback: bool = True,
        start_step: int = 0,
    ) -> None:
        """Starts without memory.

        Args:
            group: The data-parallel group.
            ratio: Share of the values that is sent, in (0, 1].
            selection: ``sort`` sends exactly ceil(ratio n) values of a tensor, ``sidco`` about
                that many, at less cost.
            error_feedback: Keep e; without it what is not sent is lost.
            start_step: First step that is compressed.

        Raises:
            ValueError: A value is not allowed.
        """
        super().__init__(group, start_step=start_step)
        if not 0 < ratio <= 1:
            raise ValueError(f"topk: ratio is {ratio}, allowed is above 0 and up to 1")
        if selection not in ("sort", "sidco"):
            raise ValueError(f"topk: selection is {selection!r}, allowed are sort, sidco")
        self.ratio = ratio
        self.selection = selection
        self.error_feedback = error_feedback

    def _chosen(self, values: Tensor) -> Tensor:
        """Returns the indices to send, ascending: int64."""
        if self.ratio == 1 or not values.numel():
            return torch.arange(values.numel(), device=values.device)
        magnitudes = values.abs()
        if self.selection == "sort":
            magnitudes = torch.where(magnitudes.isnan(), torch.inf, magnitudes)
            return magnitudes.topk(ceil(self.ratio * values.numel())).indices.sort().values
        eta = sidco.threshold(magnitudes, self.ratio)
        return (~(magnitudes <= eta)).nonzero().view(-1)

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        total = sum(tensor.numel() for tensor in tensors.values())
        if total > LARGEST_INDEX:
            raise ValueError(f"topk: {total} values in a call, allowed are {LARGEST_INDEX}")
        indices, values, at = [], [], 0
        for name, tensor in tensors.items():
            wanted = self._with_residual(name, tensor) if self.error_feedback else tensor.float()
            flat = wanted.reshape(-1)
            chosen = self._chosen(flat)
            indices.append((chosen + at).int())
            values.append(flat[chosen])
            if self.error_feedback:
                left = flat.clone()
                left[chosen] -= flat[chosen]
                self._keep_residual(name, left.view(tensor.shape))
            at += tensor.numel()
        if not total:
            return
        message = torch.cat([torch.cat(indices), torch.cat(values).view(torch.int32)])
        result = torch.zeros(total, dtype=torch.float32, device=message.device)
        for row in self._channel.gather_uneven(message):
            index, value = row.view(2, -1)
            result.index_add_(0, index.long(), value.contiguous().view(torch.float32))
        write_back(result.div_(self._channel.size), tensors)
