"""SparseLoCo: many local steps, then sparse quantised pseudo-gradients (arXiv 2508.15706).

Ranks train on their own for H steps from common parameters A; then, with the residual e,

    D  = A - theta                    the pseudo-gradient
    e <- beta e + D
    s  = Q(top-k of each chunk of e)
    e <- e - s
    A <- A - alpha mean_i(s_i)        added in rank order;  theta <- A

so the residual takes the place of the outer optimiser's momentum. With H = 1, every value sent and
no quantiser it is plain averaging of parameters. On the wire, every H steps: k values a chunk,
through the compressor if there is one, and k positions in the chunk of two bytes each (none if
k is the chunk). State: e (local), A (shared).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.compressors import Compressor
from megatron_taco.gradients.messages import flatten, write_back
from megatron_taco.gradients.method import GradientMethod

LARGEST_CHUNK = 2**15
_ANCHOR = "anchor"
_RESIDUAL = "residual"


class SparseLoCo(GradientMethod):
    """See this module's docstring; ``reduce`` is called after every optimiser step."""

    name = "sparseloco"
    operates_on = "parameters"

    def __init__(
        self,
        group: ProcessGroup,
        *,
        local_steps: int = 15,
        ratio: float = 0.02,
        chunk: int = 4096,
        residual_decay: float = 0.95,
        outer_lr: float = 1.0,
        compressor: Compressor | None = None,
        start_step: int = 0,
    ) -> None:
        """Starts without memory.

        Args:
            group: The data-parallel group.
            local_steps: H.
            ratio: Share of a chunk's values that is sent, in (0, 1]; k is rounded up.
            chunk: Values of a chunk, at most 32768.
            residual_decay: beta.
            outer_lr: alpha.
            compressor: Q; None sends FP32.
            start_step: Steps before it average the parameters exactly.

        Raises:
            ValueError: A value is not allowed.
        """
        super().__init__(group, start_step=start_step)
        for key, value, good, allowed in (
            ("local_steps", local_steps, local_steps >= 1, "1 or more"),
            ("ratio", ratio, 0 < ratio <= 1, "above 0 and up to 1"),
            ("chunk", chunk, 1 <= chunk <= LARGEST_CHUNK, f"1 to {LARGEST_CHUNK}"),
            ("residual_decay", residual_decay, 0 <= residual_decay <= 1, "0 to 1"),
            ("outer_lr", outer_lr, outer_lr > 0, "above 0"),
        ):
            if not good:
                raise ValueError(f"sparseloco: {key} is {value}, allowed is {allowed}")
        self.local_steps = local_steps
        self.kept = ceil(ratio * chunk)
        self.chunk = chunk
        self.residual_decay = residual_decay
        self.outer_lr = outer_lr
        self.compressor = compressor

    @property
    def has_begun(self) -> bool:
        """Whether the common parameters of a round are known."""
        return _ANCHOR in self._shared

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the common parameters that the first round starts from, before its first step."""
        self._shared[_ANCHOR] = flatten(tensors.values())

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        super()._average(tensors)
        self.begin(tensors)

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        if _ANCHOR not in self._shared:
            raise RuntimeError(
                "sparseloco: begin() was not called before the first local step, so the round has "
                "no parameters to start from"
            )
        if (step + 1 - self.start_step) % self.local_steps:
            return
        anchor = self._shared[_ANCHOR]
        wanted = anchor - flatten(tensors.values())
        if (residual := self._local.get(_RESIDUAL)) is not None:
            wanted += self.residual_decay * residual
        mean, sent = self._exchange(wanted)
        self._keep_residual(_RESIDUAL, wanted - sent)
        anchor = anchor - self.outer_lr * mean
        self._shared[_ANCHOR] = anchor
        write_back(anchor, tensors)

    def _exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean over ranks of what is sent of ``wanted`` [n], and this rank's part."""
        numel = wanted.numel()
        chunks = -(-numel // self.chunk)
        rows = torch.nn.functional.pad(wanted, (0, chunks * self.chunk - numel))
        rows = rows.view(chunks, self.chunk)
        places = torch.arange(self.chunk, device=wanted.device).expand(chunks, -1)
        all_places = [places] * self._channel.size
        if self.kept < self.chunk:
            magnitudes = torch.where(rows.isnan(), torch.inf, rows.abs())
            places = magnitudes.topk(self.kept, dim=1).indices.sort(dim=1).values
            sent_places = self._channel.gather(places.short().reshape(-1).view(torch.uint8))
            all_places = [row.view(torch.int16).view(chunks, -1).long() for row in sent_places]
        values = rows.gather(1, places).reshape(-1)
        if self.compressor is None:
            all_values = self._channel.gather(values)
        else:
            payloads = self._channel.gather(self.compressor.encode(values))
            all_values = self.compressor.decode_rows(
                payloads.contiguous(), values.numel(), torch.float32
            )
        total, own = torch.zeros_like(rows), torch.zeros_like(rows)
        for rank in range(self._channel.size):
            part = torch.zeros_like(rows)
            part.scatter_(1, all_places[rank], all_values[rank].view(chunks, -1))
            total += part
            if rank == self._channel.rank:
                own = part
        mean = total.div_(self._channel.size)
        return mean.view(-1)[:numel], own.view(-1)[:numel]
