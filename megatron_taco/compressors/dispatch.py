"""The one point at which compressors reach their kernels.

CUDA tensors are taken by Triton kernels where Triton is installed and the GPU has compute
capability 8.0, all others by the compressor's own torch code. With ``TRITON_INTERPRET=1`` Triton's
interpreter runs the kernels on CPU tensors, for tests.
"""

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from megatron_taco.kernels.settings import Settings as KernelSettings

__all__ = ["KernelSettings", "Kernels", "kernels_on"]

OLDEST_CAPABILITY = (8, 0)


class Kernels(Protocol):
    """What ``megatron_taco.kernels.launch`` offers, a function a method of ``ScaledBlocks``."""

    def encode_rows(
        self, settings: KernelSettings, x: Tensor, out: Tensor | None = None, key: int = 0
    ) -> Tensor:
        """See ``ScaledBlocks.encode_rows``; n > 0, ``key`` of 64 bits for random rounding."""

    def decode_rows(
        self,
        settings: KernelSettings,
        payloads: Tensor,
        numel: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``ScaledBlocks.decode_rows``; n > 0."""

    def decode_sum(
        self, settings: KernelSettings, payloads: Tensor, numel: int, out: Tensor | None = None
    ) -> Tensor:
        """See ``ScaledBlocks.decode_sum``; n > 0."""

    def decode_sum_peers(
        self, settings: KernelSettings, addresses: Tensor, numel: int, out: Tensor
    ) -> Tensor:
        """See ``ScaledBlocks.decode_sum_peers``; n > 0."""

    def reduce_encode(
        self,
        settings: KernelSettings,
        payloads: Tensor,
        numel: int,
        out: Tensor | None = None,
        key: int = 0,
    ) -> Tensor:
        """See ``ScaledBlocks.reduce_encode``; n > 0, ``key`` as in ``encode_rows``."""

    def warm_up(
        self,
        settings: KernelSettings,
        shapes: Sequence[tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[str]:
        """See ``Compressor.warm_up``."""


def kernels_on(device: torch.device) -> Kernels | None:
    """Return the kernels for tensors on ``device``, or None where torch does the work."""
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        return _load() if not interpret and _capable(device.index) else None
    return _load() if interpret and device.type == "cpu" else None


@cache
def _capable(index: int | None) -> bool:
    """Whether Triton is installed and can compile for this CUDA device."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(index) >= OLDEST_CAPABILITY


@cache
def _load() -> Kernels:
    return cast(Kernels, import_module("megatron_taco.kernels.launch"))
