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

from megatron_taco.kernels.settings import GroupSettings
from megatron_taco.kernels.settings import Settings as KernelSettings

__all__ = [
    "GroupKernels",
    "GroupSettings",
    "KernelSettings",
    "Kernels",
    "group_kernels_on",
    "kernels_on",
]

OLDEST_CAPABILITY = (8, 0)


class Kernels(Protocol):
    """What ``megatron_taco.kernels.launch`` offers, a function for each method of ``Taco``."""

    def encode_rows(self, settings: KernelSettings, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``Taco.encode_rows``; n > 0."""

    def decode_rows(
        self,
        settings: KernelSettings,
        payloads: Tensor,
        numel: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``Taco.decode_rows``; n > 0."""

    def decode_sum(
        self, settings: KernelSettings, payloads: Tensor, numel: int, out: Tensor | None = None
    ) -> Tensor:
        """See ``Taco.decode_sum``; n > 0."""

    def decode_sum_peers(
        self, settings: KernelSettings, addresses: Tensor, numel: int, out: Tensor
    ) -> Tensor:
        """See ``Taco.decode_sum_peers``; n > 0."""

    def reduce_encode(
        self, settings: KernelSettings, payloads: Tensor, numel: int, out: Tensor | None = None
    ) -> Tensor:
        """See ``Taco.reduce_encode``; n > 0."""

    def warm_up(
        self,
        settings: KernelSettings,
        shapes: Sequence[tuple[int, int]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[str]:
        """See ``Compressor.warm_up``."""


class GroupKernels(Protocol):
    """What ``megatron_taco.kernels.group_launch`` offers, for the methods of ``BlockInteger``."""

    def encode_rows(self, settings: GroupSettings, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``BlockInteger.encode_rows``; R and n > 0."""

    def decode_rows(
        self,
        settings: GroupSettings,
        payloads: Tensor,
        numel: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``BlockInteger.decode_rows``; n > 0."""

    def decode_sum(
        self, settings: GroupSettings, payloads: Tensor, numel: int, out: Tensor | None = None
    ) -> Tensor:
        """See ``BlockInteger.decode_sum``; n > 0."""

    def reduce_encode(
        self, settings: GroupSettings, payloads: Tensor, numel: int, out: Tensor | None = None
    ) -> Tensor:
        """See ``BlockInteger.reduce_encode``; n > 0."""


EXACT_ON_GPUS = frozenset((form, "dual") for form in ("e4m3", "e5m2", "int8", "int6", "int4"))
"""Format and scales whose kernels gave the bytes of the torch code on a GPU, see
docs/results/kernels.md."""
ALL_KERNELS = "MEGATRON_TACO_ALL_KERNELS"
"""Environment variable of tests and benchmarks: with 1, use the other kernels as well."""


def kernels_on(device: torch.device, form: str, scales: str) -> Kernels | None:
    """Return the kernels for tensors on ``device``, or None where torch does the work.

    Args:
        device: Where the tensors are.
        form: Code format of the compressor.
        scales: Its scales.
    """
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        shown = (form, scales) in EXACT_ON_GPUS or os.environ.get(ALL_KERNELS) == "1"
        return _load() if shown and not interpret and _capable(device.index) else None
    return _load() if interpret and device.type == "cpu" else None


GROUP_BITS_ON_GPUS: frozenset[int] = frozenset()
"""Bits of ``BlockInteger`` whose kernels gave the bytes of the torch code on a GPU: none has been
run on one yet."""
MAX_GROUP_ROWS = 65535


def group_kernels_on(device: torch.device, bits: int, rows: int) -> GroupKernels | None:
    """Return the kernels of ``BlockInteger`` on ``device``, or None where torch does the work.

    Args:
        device: Where the tensors are.
        bits: Of a code; there are kernels for 4 and 8.
        rows: How many there are.
    """
    if bits not in (4, 8) or rows > MAX_GROUP_ROWS:
        return None
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        shown = bits in GROUP_BITS_ON_GPUS or os.environ.get(ALL_KERNELS) == "1"
        return _load_groups() if shown and not interpret and _capable(device.index) else None
    return _load_groups() if interpret and device.type == "cpu" else None


@cache
def _load_groups() -> GroupKernels:
    return cast(GroupKernels, import_module("megatron_taco.kernels.group_launch"))


@cache
def _capable(index: int | None) -> bool:
    """Whether Triton is installed and can compile for this CUDA device."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(index) >= OLDEST_CAPABILITY


@cache
def _load() -> Kernels:
    return cast(Kernels, import_module("megatron_taco.kernels.launch"))
