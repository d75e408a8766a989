"""State that keeps its precision when the model is cast, and a cheap check that it agrees."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from megatron_taco.boundaries.random import random_bits


class FixedPrecision(nn.Module):
    """A module whose own buffers keep their dtype when the model is cast.

    Megatron casts whole models to BF16 or FP16, buffers included; a projector or a codebook has to
    stay FP32. Parameters and submodules are cast as usual, and everything changes device.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, kept in before.items():
            now = self._buffers[name]
            if kept is not None and now is not None and now.dtype != kept.dtype:
                self._buffers[name] = kept.to(now.device)
        return self


def fingerprint(*tensors: Tensor) -> Tensor:
    """Return a number that differs when any bit of ``tensors`` does: int64, 0-dim, on the device.

    A sum of the 32-bit words, each times its own odd pseudo-random factor, modulo 2^64: one changed
    word always changes it, others with a probability of about 2^-63. Nothing is synchronised.

    Raises:
        ValueError: If a tensor's size is no multiple of four bytes.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for place, tensor in enumerate(tensors):
        octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if octets.numel() % 4:
            raise ValueError(f"fingerprint: tensor {place} has {octets.numel()} bytes, not 4 n")
        words = octets.view(torch.int32).long()
        factors = random_bits(place, words.numel(), words.device) | 1
        total = total + (words * factors).sum()
    return total
