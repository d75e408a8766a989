"""The one point at which compressors reach their kernels.

CUDA tensors are taken by Triton kernels where Triton is installed, the GPU has compute capability
8.0 and the kernels of that format and those scales have been shown on a GPU to give the very bytes
of the torch code (``tests/gpu``); all others by the compressor's own torch code. With
``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels on CPU tensors, for tests.
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


ALL_KERNELS = "MEGATRON_TACO_ALL_KERNELS"
"""Environment variable of tests and benchmarks: with 1, use the kernels that are not shown yet."""


def exact_on_gpus(settings: KernelSettings) -> bool:
    """Whether these kernels gave the bytes of the torch code on a GPU, see docs/results/kernels.md.

    The others are used in tests and benchmarks until they have.
    """
    whole = settings.order in (1, settings.block) and settings.block <= 512
    return settings.scales == "dual" and whole and not settings.random


def kernels_on(device: torch.device, settings: KernelSettings) -> Kernels | None:
    """Return the kernels for tensors on ``device``, or None where torch does the work.

    Args:
        device: Where the tensors are.
        settings: Of the compressor.
    """
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        shown = exact_on_gpus(settings) or os.environ.get(ALL_KERNELS) == "1"
        return _load() if shown and not interpret and _capable(device.index) else None
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
