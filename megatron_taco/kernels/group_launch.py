"""Launching the kernels of ``BlockInteger``; nothing here synchronises."""

from typing import Any

import torch
import triton
from torch import Tensor

from megatron_taco.kernels import groups
from megatron_taco.kernels.launch import conversion_mode, interpreted
from megatron_taco.kernels.settings import GroupSettings

TILE = 2048
"""Elements of a program, but for larger groups."""
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Floating-point contraction would change codes."""


def _aligned(settings: GroupSettings, payloads: Tensor) -> bool:
    """Whether the scales of all payloads [R, bytes] lie at multiples of their size."""
    size = 2 if settings.bf16 else 4
    stride = payloads.stride(0) if payloads.dim() > 1 and payloads.shape[0] > 1 else 0
    return payloads.data_ptr() % size == 0 and stride % size == 0


def _constants(settings: GroupSettings, device: torch.device) -> dict[str, Any]:
    """Return the constants that every kernel takes."""
    return {
        "BITS": settings.bits,
        "BF16": settings.bf16,
        "B": settings.block,
        "G": max(1, TILE // settings.block),
        "MODE": conversion_mode(device),
    }


def _start(kernel: Any, grid: tuple[int, int], tensors: Any, numbers: Any, constants: Any) -> None:
    options = {} if interpreted() else _OPTIONS
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(*grid, 1)](*tensors, *numbers, **constants, **options)
    else:
        kernel[(*grid, 1)](*tensors, *numbers, **constants, **options)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def encode_rows(settings: GroupSettings, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``BlockInteger.encode_rows`` for R and n > 0."""
    x = _dense(x.detach())
    rows, numel = x.shape
    if out is None:
        size = settings.payload_bytes(numel)
        out = torch.empty(rows, size, dtype=torch.uint8, device=x.device)
    constants = _constants(settings, x.device) | {
        "LIMIT": settings.limit,
        "NORM": settings.norm,
        "STOCHASTIC": settings.stochastic,
        "ALIGNED": _aligned(settings, out),
        "T": settings.transform,
    }
    count = settings.count(numel)
    numbers = (numel, count, x.stride(0), out.stride(0), settings.key)
    grid = (triton.cdiv(count, constants["G"]), rows)
    _start(groups.encode_kernel, grid, (x, out), numbers, constants)
    return out


def decode_rows(
    settings: GroupSettings,
    payloads: Tensor,
    numel: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """``BlockInteger.decode_rows`` for n > 0."""
    payloads = _dense(payloads)
    rows = payloads.shape[0]
    if out is None:
        out = torch.empty(rows, numel, dtype=dtype, device=payloads.device)
    constants = _constants(settings, payloads.device) | {
        "LOG_LIMIT": settings.log_limit,
        "NORM": settings.norm,
        "T": settings.transform,
    }
    count = settings.count(numel)
    grid = (triton.cdiv(count, constants["G"]), rows)
    numbers = (numel, count, payloads.stride(0), out.stride(0))
    _start(groups.decode_kernel, grid, (payloads, out), numbers, constants)
    return out


def decode_sum(
    settings: GroupSettings, payloads: Tensor, numel: int, out: Tensor | None = None
) -> Tensor:
    """``BlockInteger.decode_sum`` for n > 0: FP32 [n], or as ``out`` is."""
    payloads = _dense(payloads)
    if out is None:
        out = torch.empty(numel, dtype=torch.float32, device=payloads.device)
    constants = _constants(settings, payloads.device) | {
        "RANKS": payloads.shape[0],
        "LOG_LIMIT": settings.log_limit,
        "OFFSET": settings.offset,
        "NORM": settings.norm,
        "T": settings.transform,
    }
    count = settings.count(numel)
    numbers = (numel, count, payloads.stride(0))
    grid = (triton.cdiv(count, constants["G"]), 1)
    _start(groups.decode_sum_kernel, grid, (payloads, out), numbers, constants)
    return out


def reduce_encode(
    settings: GroupSettings, payloads: Tensor, numel: int, out: Tensor | None = None
) -> Tensor:
    """``BlockInteger.reduce_encode`` for n > 0."""
    payloads = _dense(payloads)
    if out is None:
        size = settings.payload_bytes(numel)
        out = torch.empty(size, dtype=torch.uint8, device=payloads.device)
    constants = _constants(settings, payloads.device) | {
        "LIMIT": settings.limit,
        "RANKS": payloads.shape[0],
        "LOG_LIMIT": settings.log_limit,
        "OFFSET": settings.offset,
        "STOCHASTIC": settings.stochastic,
        "ALIGNED": _aligned(settings, out),
    }
    count = settings.count(numel)
    numbers = (count, payloads.stride(0), settings.key)
    grid = (triton.cdiv(count, constants["G"]), 1)
    _start(groups.reduce_encode_kernel, grid, (payloads, out), numbers, constants)
    return out
