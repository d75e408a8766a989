"""Launching the kernels; nothing here synchronises.

What a launch depends on is looked up by settings, shapes and alignments, so that a repeated call
costs a look-up and the launch itself.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from time import perf_counter
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_taco.kernels import plan
from megatron_taco.kernels.arithmetic import FP8_CONVERSIONS, PORTABLE, PTX
from megatron_taco.kernels.decode import decode_kernel
from megatron_taco.kernels.encode import encode_kernel
from megatron_taco.kernels.plan import Place
from megatron_taco.kernels.reduce import decode_sum_kernel, reduce_encode_kernel
from megatron_taco.kernels.settings import Settings

MAX_ROWS = 65535  # of a grid's second axis
PLANS = 1024  # launches that are remembered, for each kernel


class Launch:
    """A kernel with all that is the same in every call of equal shapes and alignments.

    The compiled kernel is kept: finding it again from some thirty arguments takes longer than to
    launch it.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        constants: dict[str, Any],
        registers: int | None,
    ) -> None:
        """Prepare; nothing is compiled yet."""
        self._kernel = kernel
        self._grid = grid
        self._integers = integers
        self._constants = tuple(constants[n] for n in kernel.arg_names if n in constants)
        # Floating-point contraction would change codes.
        self._options = {
            "num_warps": plan.WARPS,
            "enable_fp_fusion": False,
            "maxnreg": registers,
        }
        self._run: Callable[..., None] | None = None

    def __call__(
        self, source: Tensor, target: Tensor, device: torch.device, *changing: int
    ) -> None:
        """Launch on the current stream of ``device``, whichever device is current.

        ``changing`` are the kernel's arguments that differ from call to call, of 32 bits.
        """
        arguments = (source, target, *changing, *self._integers, *self._constants)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(arguments)
        else:
            self._start(arguments)

    def _start(self, arguments: tuple[Any, ...]) -> None:
        if self._run is not None:
            self._run(*arguments)
        elif interpreted():
            self._kernel[self._grid](*arguments)
        else:
            self._run = self._kernel[self._grid](*arguments, **self._options)[self._grid]


def interpreted() -> bool:
    """Whether Triton's interpreter was chosen when the kernels were defined."""
    return not isinstance(encode_kernel, triton.JITFunction)


@cache
def conversion_mode(device: torch.device) -> int:
    """Return what kernels may use on ``device``, see codes.py."""
    if interpreted():
        return int(PORTABLE.value)
    capability = torch.cuda.get_device_capability(device)
    return int((FP8_CONVERSIONS if capability >= (8, 9) else PTX).value)


def _words(key: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits of a key as signed integers."""
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with elements of a row side by side; copies only if they are not."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _grid(settings: Settings, constants: dict[str, Any], numel: int, rows: int = 1) -> Any:
    return triton.cdiv(settings.count(numel), constants["G"]), rows, 1


@lru_cache(PLANS)
def _encode(
    settings: Settings,
    dtype: torch.dtype,
    numel: int,
    x: Place,
    payloads: Place,
    device: torch.device,
    mode: int,
) -> Launch:
    whole = numel % settings.block == 0
    pairs, lanes, vector, registers = plan.encode_shape(settings, dtype, x, payloads, whole)
    x_unit, payload_unit = plan.encode_units(settings, dtype, x, payloads, vector)
    constants = {
        **plan.common(settings, lanes, vector, mode),
        **plan.writes(payloads, settings, vector),
        "X_UNIT": x_unit,
        "PAYLOAD_UNIT": payload_unit,
        "WHOLE": whole,
        "PAIRS": pairs,
        "RANDOM": settings.random,
    }
    integers = (
        numel,
        settings.count(numel),
        x.stride // x_unit,
        payloads.stride // payload_unit,
    )
    grid = _grid(settings, constants, numel, x.rows)
    return Launch(encode_kernel, grid, integers, constants, registers)


def encode_rows(
    settings: Settings, x: Tensor, out: Tensor | None = None, key: int = 0, first_row: int = 0
) -> Tensor:
    """``ScaledBlocks.encode_rows`` for FP32, BF16 or FP16 [R, n], R and n > 0: uint8 [R, bytes].

    For random rounding the rows are those from ``first_row`` on of what has the ``key``.
    """
    x = _dense(x.detach() if x.requires_grad else x)
    rows, numel = x.shape
    device = x.device
    if out is None:
        out = torch.empty(rows, settings.payload_bytes(numel), dtype=torch.uint8, device=device)
    if rows > MAX_ROWS:
        for at in range(0, rows, MAX_ROWS):
            encode_rows(settings, x[at : at + MAX_ROWS], out[at : at + MAX_ROWS], key, at)
        return out
    places = Place.of(x), Place.of(out)
    launch = _encode(settings, x.dtype, numel, *places, device, conversion_mode(device))
    launch(x, out, device, *_words(key), first_row)
    return out


@lru_cache(PLANS)
def _decode(
    settings: Settings,
    dtype: torch.dtype,
    numel: int,
    payloads: Place,
    out: Place,
    device: torch.device,
    mode: int,
) -> Launch:
    vector = 16 // dtype.itemsize
    lanes = plan.LANES[dtype.itemsize][settings.block]
    out_unit = out.unit(vector)
    constants = {
        **plan.common(settings, lanes, vector, mode),
        **plan.reads(payloads, settings, vector),
        "OUT_UNIT": out_unit,
        "WHOLE": numel % settings.block == 0,
    }
    integers = (
        numel,
        settings.count(numel),
        out.stride // out_unit,
        payloads.stride // constants["PAYLOAD_UNIT"],
    )
    grid = _grid(settings, constants, numel, payloads.rows)
    return Launch(decode_kernel, grid, integers, constants, None)


def decode_rows(
    settings: Settings,
    payloads: Tensor,
    numel: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """``ScaledBlocks.decode_rows`` for n > 0."""
    payloads = _dense(payloads)
    rows = payloads.shape[0]
    device = payloads.device
    if out is None:
        out = torch.empty(rows, numel, dtype=dtype, device=device)
    if rows > MAX_ROWS:
        for at in range(0, rows, MAX_ROWS):
            part = slice(at, at + MAX_ROWS)
            decode_rows(settings, payloads[part], numel, dtype, out[part])
        return out
    places = Place.of(payloads), Place.of(out)
    launch = _decode(settings, dtype, numel, *places, device, conversion_mode(device))
    launch(payloads, out, device)
    return out


@lru_cache(PLANS)
def _reduce(
    settings: Settings,
    numel: int,
    payloads: Place,
    out: Place,
    device: torch.device,
    mode: int,
) -> Launch:
    lanes, vector, registers = plan.reduce_shape(settings, payloads, out)
    constants = {
        **plan.common(settings, lanes, vector, mode),
        **plan.reads(payloads, settings, vector),
        **plan.writes(out, settings, vector),
        "PEERS": False,
        "RANKS": payloads.rows,
        "RANDOM": settings.random,
    }
    integers = settings.count(numel), payloads.stride // constants["PAYLOAD_UNIT"]
    grid = _grid(settings, constants, numel)
    return Launch(reduce_encode_kernel, grid, integers, constants, registers)


def reduce_encode(
    settings: Settings,
    payloads: Tensor,
    numel: int,
    out: Tensor | None = None,
    key: int = 0,
) -> Tensor:
    """``ScaledBlocks.reduce_encode`` for n > 0."""
    payloads = _dense(payloads)
    device = payloads.device
    if out is None:
        out = torch.empty(settings.payload_bytes(numel), dtype=torch.uint8, device=device)
    places = Place.of(payloads), Place.of(out)
    launch = _reduce(settings, numel, *places, device, conversion_mode(device))
    launch(payloads, out, device, *_words(key))
    return out


@lru_cache(PLANS)
def _sum(
    settings: Settings,
    dtype: torch.dtype,
    numel: int,
    payloads: Place,
    out: Place,
    device: torch.device,
    mode: int,
    peers: bool = False,
) -> Launch:
    lanes, vector = plan.sum_shape(settings, dtype)
    constants = {
        **plan.common(settings, lanes, vector, mode),
        **plan.reads(payloads, settings, vector),
        "PEERS": peers,
        "RANKS": payloads.rows,
        "WHOLE": numel % settings.block == 0,
    }
    count = settings.count(numel)
    integers = numel, count, payloads.stride // constants["PAYLOAD_UNIT"]
    grid = _grid(settings, constants, numel)
    return Launch(decode_sum_kernel, grid, integers, constants, None)


def decode_sum(
    settings: Settings, payloads: Tensor, numel: int, out: Tensor | None = None
) -> Tensor:
    """``ScaledBlocks.decode_sum`` for n > 0: FP32 [n], or as ``out`` is."""
    payloads = _dense(payloads)
    device = payloads.device
    if out is None:
        out = torch.empty(numel, dtype=torch.float32, device=device)
    places = Place.of(payloads), Place.of(out)
    launch = _sum(settings, out.dtype, numel, *places, device, conversion_mode(device))
    launch(payloads, out, device)
    return out


def decode_sum_peers(settings: Settings, addresses: Tensor, numel: int, out: Tensor) -> Tensor:
    """``ScaledBlocks.decode_sum_peers`` for n > 0."""
    device = out.device
    # Whole payloads at multiples of 16, as one row is; where each lies is in the table.
    places = Place(addresses.shape[0], 0, 0), Place.of(out)
    mode = conversion_mode(device)
    launch = _sum(settings, out.dtype, numel, *places, device, mode, peers=True)
    launch(addresses, out, device)
    return out


def warm_up(
    settings: Settings,
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[str]:
    """``Compressor.warm_up``: runs the kernels on small tensors of the same alignment.

    Sums are compiled into FP32 and into each of ``dtypes``.
    """
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
            for into in dict.fromkeys((dtype, torch.float32)):
                total = torch.empty(small, dtype=into, device=device)
                call = partial(decode_sum, settings, payloads, small, total)
                timed(f"decode_sum of {rows} to {into}", call)
            timed(f"reduce_encode of {rows}", partial(reduce_encode, settings, payloads, small))
    return [f"{name}: {spent:.2f} s" for name, spent in seconds.items()]
