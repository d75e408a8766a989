"""CD-Adam: compressed differences both ways, for adaptive optimisers (arXiv 2111.00705).

Each rank keeps a reference r_i of its own gradient, and all keep a reference a of the mean; what is
sent is the compressed difference to the reference, in both directions:

    c_i = C(g_i - r_i);   r_i <- r_i + c_i                   every rank to the owner of each slice
    m   <- m + mean_i(c_i)                                   the owner: m = mean of the r_i
    d   = C(m - a);       a   <- a + d                       the owner to every rank
    g_i <- a                                                 what Adam or AMSGrad gets

The differences shrink as gradients settle, and the error with them, so momenta are not fed with a
bias. Here C is any compressor of this package (published: the scaled sign), and every rank owns a
P-th of the vector. On the wire: two messages of a payload of n/P elements to each other rank.
State: r_i, and m of the own slice (local), a (shared).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.compressors import Compressor
from megatron_taco.gradients.messages import flatten, write_back
from megatron_taco.gradients.method import GradientMethod, keep_finite

_OWN, _SLICE, _MEAN = "reference", "slice_mean", "mean"


class CDAdam(GradientMethod):
    """See this module's docstring; the optimiser itself stays Megatron's."""

    name = "cd_adam"

    def __init__(self, group: ProcessGroup, *, compressor: Compressor, start_step: int = 0) -> None:
        """Starts with all references at 0.

        Args:
            group: The data-parallel group.
            compressor: C.
            start_step: First step that is compressed.

        Raises:
            ValueError: ``start_step`` is negative.
        """
        super().__init__(group, start_step=start_step)
        self.compressor = compressor

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        size, code = self._channel.size, self.compressor
        values = flatten(tensors.values())
        numel = values.numel()
        if not numel:
            return
        width = -(-numel // size)
        rows = torch.nn.functional.pad(values, (0, size * width - numel)).view(size, width)
        own = self._local.get(_OWN, torch.zeros_like(rows))
        part = self._local.get(_SLICE, rows.new_zeros(width))
        mean = self._shared.get(_MEAN, torch.zeros_like(rows))

        payloads = code.encode_rows(rows - own)
        sent = code.decode_rows(payloads, width, torch.float32)
        self._local[_OWN] = keep_finite(own + sent, own)
        arrived = code.decode_rows(
            self._channel.exchange(payloads).contiguous(), width, torch.float32
        )
        good = torch.where(arrived.isfinite(), arrived, 0.0)
        change = good[0].clone()
        for rank in range(1, size):
            change += good[rank]
        part = part + change.div_(size)
        self._local[_SLICE] = part
        # A block that some rank sent as NaN stays out of m, as it does out of that rank's own
        # reference, but the result is NaN.
        told = torch.where(arrived.isfinite().all(0), part, torch.nan)
        answers = self._channel.gather(code.encode(told - mean[self._channel.rank])).contiguous()
        result = mean + code.decode_rows(answers, width, torch.float32)
        self._shared[_MEAN] = keep_finite(result, mean)
        write_back(result.view(-1)[:numel], tensors)
