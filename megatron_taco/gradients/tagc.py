"""TAGC: selective sparsification, summed without loss (arXiv 2504.05638).

The matrices of a transformer's layers, told by name, are sparsified with a residual, the others go
exactly. For a chosen tensor on each rank

    a  = g + e
    t  = the smallest threshold of a fixed table with no more than ratio n values above it
    s  = a where |a| > t, else 0;     e <- a - s
    g <- mean over ranks of s         by homomorphic.sparse_sum: a bitmap, then a sketch

The table is max|a| 2^(-j/8), j = 0 ... 127, and the entry is found by bisection: seven counts. On
the wire: for the chosen, n/8 bytes of bitmap to every rank and an all-reduce of 4 bytes a cell;
for the others an exact all-reduce. State: e (local).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.gradients.homomorphic import PACKINGS, Packing, sparse_sum
from megatron_taco.gradients.messages import write_back
from megatron_taco.gradients.method import GradientMethod

STEPS_PER_OCTAVE = 8
TABLE_BITS = 7
SELECTED = "*.layers.*.weight"


def table_threshold(magnitudes: Tensor, ratio: float) -> Tensor:
    """Returns the smallest entry of the table with at most ``ratio`` n magnitudes above: FP32.

    Args:
        magnitudes: FP32 [n], n > 0; what is not finite does not count.
        ratio: Share of the values that may be above.
    """
    values = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    largest = values.max()
    most = ratio * values.numel()
    entry = torch.zeros_like(largest)
    for bit in reversed(range(TABLE_BITS)):
        next_entry = entry + 2**bit
        bound = largest * torch.exp2(-next_entry / STEPS_PER_OCTAVE)
        entry = torch.where((values > bound).sum() <= most, next_entry, entry)
    return largest * torch.exp2(-entry / STEPS_PER_OCTAVE)


class TAGC(GradientMethod):
    """See this module's docstring."""

    name = "tagc"

    def __init__(
        self,
        group: ProcessGroup,
        *,
        ratio: float = 0.05,
        packing: Packing = "sketch",
        start_step: int = 0,
    ) -> None:
        """Starts without memory.

        Args:
            group: The data-parallel group.
            ratio: Most values of a tensor that are sent, as a share in (0, 1).
            packing: How the sparse values are summed: ``sketch`` or ``union``.
            start_step: First step that is compressed.

        Raises:
            ValueError: A value is not allowed.
        """
        super().__init__(group, start_step=start_step)
        if not 0 < ratio < 1:
            raise ValueError(f"tagc: ratio is {ratio}, allowed is above 0 and below 1")
        if packing not in PACKINGS:
            raise ValueError(f"tagc: packing is {packing!r}, allowed are sketch, union")
        self.ratio = ratio
        self.packing: Packing = packing

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        chosen = {n: t for n, t in tensors.items() if t.numel() and fnmatchcase(n, SELECTED)}
        self._average({name: t for name, t in tensors.items() if name not in chosen})
        sent = []
        for name, tensor in chosen.items():
            wanted = self._with_residual(name, tensor).view(-1)
            magnitudes = wanted.abs()
            keep = ~(magnitudes <= table_threshold(magnitudes, self.ratio))
            part = torch.where(keep, wanted, 0.0)
            self._keep_residual(name, (wanted - part).view(tensor.shape))
            sent.append(part)
        if sent:
            total = sparse_sum(torch.cat(sent), self._channel, self.packing)
            write_back(total.div_(self._channel.size), chosen)
