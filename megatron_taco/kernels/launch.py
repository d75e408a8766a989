"""Launching the kernels: shapes, alignment and launch configurations; nothing here synchronises.

Configurations follow from block and dtype alone, never from measurements, so all ranks agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from time import perf_counter
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_taco.kernels.arithmetic import FP8_CONVERSIONS, PORTABLE, PTX
from megatron_taco.kernels.decode import decode_kernel
from megatron_taco.kernels.encode import encode_kernel
from megatron_taco.kernels.reduce import decode_sum_kernel, reduce_encode_kernel
from megatron_taco.kernels.settings import Settings

WARPS = 1
MAX_ROWS = 65535  # of a grid's second axis
# Threads of a block, by bytes of a value and by block. A thread holds 64 elements or fewer: more
# would leave too few threads, fewer repeat what is done once for a block too often.
LANES = {
    2: {32: 2, 64: 2, 128: 4, 256: 4, 512: 8},
    4: {32: 4, 64: 4, 128: 4, 256: 8, 512: 16},
}
# Decoding needs registers for its rare path, so a thread holds 32 elements.
DECODE_LANES = {2: {32: 2, 64: 2, 128: 4, 256: 8, 512: 16}, 4: LANES[4]}
# The same for sums: the codes of more payloads than two need registers of their own.
SUM_LANES = {32: 2, 64: 2, 128: 4, 256: 8, 512: 16}
PAIR_LANES = {32: 2, 64: 2, 128: 4, 256: 4, 512: 8}
# Limits to what a thread may hold, found from what the compiler does without: rare branches must
# not cost registers where they are not taken.
ENCODE_REGISTERS = 96
SUM_REGISTERS = 128


@dataclass(frozen=True)
class Tile:
    """How a tile is spread over threads, see transform.py."""

    lanes: int
    blocks: int
    vector: int

    @classmethod
    def of(cls, settings: Settings, lanes: int, vector: int) -> "Tile":
        """Return the tile in which ``lanes`` threads hold a block."""
        return cls(lanes, 32 * WARPS // lanes, vector)

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' names for these."""
        return {"L": self.lanes, "G": self.blocks, "V": self.vector}


def interpreted() -> bool:
    """Whether Triton's interpreter was chosen when the kernels were defined."""
    return not isinstance(encode_kernel, triton.JITFunction)


def conversion_mode(device: torch.device) -> int:
    """Return what kernels may use on ``device``, see codes.py."""
    if interpreted():
        return int(PORTABLE.value)
    capability = torch.cuda.get_device_capability(device)
    return int((FP8_CONVERSIONS if capability >= (8, 9) else PTX).value)


def _code_access(settings: Settings, vector: int) -> int:
    """Return how many bytes are read or written at once for the codes of ``vector`` elements."""
    return vector // 4 if settings.bits == 6 else vector * settings.bits // 8


def _unit(rows: int, stride: int, access: int) -> int:
    """Return the largest power of two that divides the row stride, at most ``access``."""
    return access if rows == 1 else gcd(stride, access)


def _fits(payloads: Tensor, settings: Settings, vector: int) -> bool:
    """Whether the codes of ``vector`` elements can be read at once in every row."""
    access = _code_access(settings, vector)
    rows = payloads.shape[0]
    return payloads.data_ptr() % 16 == 0 and _unit(rows, payloads.stride(0), access) == access


def _payload_unit(payloads: Tensor, settings: Settings, vector: int) -> int:
    """Return the constant part of the stride of payloads; 1 if the first has an odd address."""
    unit = _unit(payloads.shape[0], payloads.stride(0), _code_access(settings, vector))
    return 1 if payloads.data_ptr() % 2 else unit


def _int6_access(settings: Settings, vector: int, unit: int) -> int:
    """Return ACCESS of codes.py."""
    return unit if settings.bits == 6 and unit == vector // 4 else 1


def _aligned(payloads: Tensor, settings: Settings) -> bool:
    """Whether every scale of every row lies at a multiple of its size."""
    size = 2 if settings.scales == "merged_bf16" else 4
    stride = payloads.stride(0) if payloads.shape[0] > 1 else 0
    return payloads.data_ptr() % size == 0 and stride % size == 0


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with elements of a row side by side; copies only if they are not."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _new(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return ``out``, or a new tensor."""
    return torch.empty(shape, dtype=dtype, device=device) if out is None else out


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    registers: int | None,
    *args: Any,
    **constants: Any,
) -> None:
    """Launch; floating-point contraction would change codes and is off."""
    options: dict[str, Any] = {}
    if not interpreted():
        options = {"num_warps": WARPS, "enable_fp_fusion": False, "maxnreg": registers}
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **constants, **options)
    else:
        kernel[grid](*args, **constants, **options)


def _row_slices(rows: int) -> list[slice]:
    """Cut rows into what one launch can take."""
    return [slice(at, at + MAX_ROWS) for at in range(0, rows, MAX_ROWS)]


def encode_rows(settings: Settings, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``Taco.encode_rows`` for FP32, BF16 or FP16 [R, n], R and n > 0: uint8 [R, bytes]."""
    x = _dense(x.detach())
    rows, numel = x.shape
    size = x.element_size()
    payloads = _new(out, (rows, settings.payload_bytes(numel)), torch.uint8, x.device)
    whole = numel % settings.block == 0
    even_rows = rows == 1 or x.stride(0) % 2 == 0
    pairs = x.dtype == torch.bfloat16 and whole and even_rows and x.data_ptr() % 4 == 0
    vector = 16 if settings.bits == 6 and pairs and _fits(payloads, settings, 16) else 16 // size
    tile = Tile.of(settings, LANES[size][settings.block], vector)
    count = settings.count(numel)
    x_unit = _unit(rows, x.stride(0), 16 // size)
    payload_unit = _payload_unit(payloads, settings, vector)
    for part in _row_slices(rows):
        _start(
            encode_kernel,
            (triton.cdiv(count, tile.blocks), len(range(rows)[part])),
            x.device,
            ENCODE_REGISTERS if size == 2 and settings.bits != 6 else None,
            x[part],
            payloads[part],
            numel,
            count,
            x.stride(0) // x_unit,
            payloads.stride(0) // payload_unit,
            X_UNIT=x_unit,
            PAYLOAD_UNIT=payload_unit,
            WHOLE=whole,
            PAIRS=pairs,
            FORMAT=settings.format,
            BITS=settings.bits,
            LIMIT=settings.limit,
            TARGET=settings.target,
            SCALES=settings.scales,
            ROTATE=settings.rotate,
            BLOCK=settings.block,
            MODE=conversion_mode(x.device),
            **tile.constants,
        )
    return payloads


def decode_rows(
    settings: Settings,
    payloads: Tensor,
    numel: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """``Taco.decode_rows`` for n > 0."""
    payloads = _dense(payloads)
    rows = payloads.shape[0]
    vector = 16 // dtype.itemsize
    tile = Tile.of(settings, DECODE_LANES[dtype.itemsize][settings.block], vector)
    out = _new(out, (rows, numel), dtype, payloads.device)
    count = settings.count(numel)
    out_unit = _unit(rows, numel, vector)
    payload_unit = _payload_unit(payloads, settings, vector)
    for part in _row_slices(rows):
        _start(
            decode_kernel,
            (triton.cdiv(count, tile.blocks), len(range(rows)[part])),
            payloads.device,
            None,
            payloads[part],
            out[part],
            numel,
            count,
            numel // out_unit,
            payloads.stride(0) // payload_unit,
            OUT_UNIT=out_unit,
            PAYLOAD_UNIT=payload_unit,
            WHOLE=numel % settings.block == 0,
            ALIGNED=_aligned(payloads, settings),
            ACCESS=_int6_access(settings, vector, payload_unit),
            FAST=dtype != torch.float32,
            FORMAT=settings.format,
            BITS=settings.bits,
            LOG_LIMIT=settings.log_limit,
            SCALES=settings.scales,
            ROTATE=settings.rotate,
            BLOCK=settings.block,
            MODE=conversion_mode(payloads.device),
            **tile.constants,
        )
    return out


def reduce_encode(
    settings: Settings, payloads: Tensor, numel: int, out: Tensor | None = None
) -> Tensor:
    """``Taco.reduce_encode`` for n > 0."""
    payloads = _dense(payloads)
    ranks = payloads.shape[0]
    lanes = (PAIR_LANES if ranks <= 2 else SUM_LANES)[settings.block]
    vector = 16 if _fits(payloads, settings, 16) and lanes * 16 <= settings.block else 8
    tile = Tile.of(settings, lanes, vector)
    out = _new(out, (settings.payload_bytes(numel),), torch.uint8, payloads.device)
    count = settings.count(numel)
    payload_unit = _payload_unit(payloads, settings, vector)
    _start(
        reduce_encode_kernel,
        (triton.cdiv(count, tile.blocks),),
        payloads.device,
        SUM_REGISTERS if ranks <= 4 else None,
        payloads,
        out,
        count,
        payloads.stride(0) // payload_unit,
        RANKS=ranks,
        PAYLOAD_UNIT=payload_unit,
        ALIGNED=_aligned(payloads, settings),
        ACCESS=_int6_access(settings, vector, payload_unit),
        FORMAT=settings.format,
        BITS=settings.bits,
        LIMIT=settings.limit,
        TARGET=settings.target,
        LOG_LIMIT=settings.log_limit,
        SCALES=settings.scales,
        BLOCK=settings.block,
        MODE=conversion_mode(payloads.device),
        **tile.constants,
    )
    return out


def decode_sum(
    settings: Settings, payloads: Tensor, numel: int, out: Tensor | None = None
) -> Tensor:
    """``Taco.decode_sum`` for n > 0: FP32 [n], or as ``out`` is."""
    payloads = _dense(payloads)
    tile = Tile.of(settings, LANES[4][settings.block], 4)
    out = _new(out, (numel,), torch.float32, payloads.device)
    count = settings.count(numel)
    payload_unit = _payload_unit(payloads, settings, tile.vector)
    _start(
        decode_sum_kernel,
        (triton.cdiv(count, tile.blocks),),
        payloads.device,
        None,
        payloads,
        out,
        numel,
        count,
        payloads.stride(0) // payload_unit,
        RANKS=payloads.shape[0],
        PAYLOAD_UNIT=payload_unit,
        ALIGNED=_aligned(payloads, settings),
        ACCESS=_int6_access(settings, tile.vector, payload_unit),
        WHOLE=numel % settings.block == 0,
        FORMAT=settings.format,
        BITS=settings.bits,
        LOG_LIMIT=settings.log_limit,
        SCALES=settings.scales,
        ROTATE=settings.rotate,
        BLOCK=settings.block,
        MODE=conversion_mode(payloads.device),
        **tile.constants,
    )
    return out


def warm_up(
    settings: Settings,
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[str]:
    """``Compressor.warm_up``: runs the kernels on small tensors of the same alignment."""
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Tensor]) -> Tensor:
        start = perf_counter()
        result = call()
        seconds[name] = seconds.get(name, 0.0) + perf_counter() - start
        return result

    for rows, numel in shapes:
        blocks = 16 + settings.count(numel) % 16  # strides keep their powers of two up to 16
        small = blocks * settings.block - -numel % settings.block
        for dtype in dtypes:
            x = torch.zeros(rows, small, dtype=dtype, device=device)
            payloads = timed(f"encode {dtype}", partial(encode_rows, settings, x))
            timed(f"decode {dtype}", partial(decode_rows, settings, payloads, small, dtype))
            timed(f"decode_sum of {rows}", partial(decode_sum, settings, payloads, small))
            timed(f"reduce_encode of {rows}", partial(reduce_encode, settings, payloads, small))
    return [f"{name}: {spent:.2f} s" for name, spent in seconds.items()]
