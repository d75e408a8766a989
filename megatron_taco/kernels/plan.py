"""Launch configurations: from settings, shapes and alignments to a kernel's constants.

They follow from these alone, never from measurements, so all ranks agree.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_taco.kernels.settings import Settings

WARPS = 1
# Threads of a block, by bytes of a value and by block. A thread holds 64 elements or fewer: more
# would leave too few threads, fewer repeat what is done once for a block too often. (A block of
# 4096 has 128 in each of a warp's threads.)
LANES = {
    2: {32: 2, 64: 2, 128: 4, 256: 4, 512: 8, 1024: 16, 2048: 32, 4096: 32},
    4: {32: 4, 64: 4, 128: 4, 256: 8, 512: 16, 1024: 32, 2048: 32, 4096: 32},
}
# Limits to what a thread may hold, found from what the compiler does without: rare branches must
# not cost registers where they are not taken.
ENCODE_REGISTERS = 96
SUM_REGISTERS = 128
# Sums of more payloads than four need registers for their codes, so fewer elements a thread; sums
# of bytes are bound by memory, and gain by more threads.
MANY_LANES = {32: 2, 64: 2, 128: 4, 256: 8, 512: 16, 1024: 32, 2048: 32, 4096: 32}


class Place(NamedTuple):
    """Rows in memory, as far as a launch depends on it.

    Attributes:
        rows: How many there are.
        stride: From one to the next, in elements.
        offset: Address of the first, modulo 16.
    """

    rows: int
    stride: int
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "Place":
        """Return where the rows of ``x`` lie: [R, n], or [n] for one row."""
        one = x.dim() == 1 or x.shape[0] == 1
        return cls(1 if one else x.shape[0], 0 if one else x.stride(0), x.data_ptr() % 16)

    def unit(self, access: int) -> int:
        """Return the largest power of two that divides the stride, at most ``access``."""
        return gcd(self.stride, access) if self.stride else access

    def multiple_of(self, size: int) -> bool:
        """Whether all rows of bytes lie at multiples of ``size``, which divides 16."""
        return self.offset % size == 0 and self.stride % size == 0


def code_access(settings: Settings, vector: int) -> int:
    """Return the bytes for which addresses have to be multiples of it, for ``vector`` codes."""
    if settings.bits == 6:
        return vector // 4
    return min(vector // 2, 4) if settings.bits == 4 else 1


def payload_unit(payloads: Place, settings: Settings, vector: int) -> int:
    """Return the constant part of the stride of payloads; 1 if the first has an odd address."""
    if payloads.offset % 2:
        return 1
    return payloads.unit(vector // 4 if settings.bits == 6 else vector * settings.bits // 8)


def encode_units(
    settings: Settings, dtype: torch.dtype, x: Place, payloads: Place, vector: int
) -> tuple[int, int]:
    """Return the constant parts of the strides of values and of payloads.

    Where neither lets a thread move all its elements or four codes at once, codes of a byte go one
    by one: in between Triton gives bytes to other threads by a permutation that it makes twice
    (docs/decisions.md).
    """
    access = 16 // dtype.itemsize
    x_unit, unit = x.unit(access), payload_unit(payloads, settings, vector)
    return (1, 1) if settings.bits == 8 and x_unit < access and unit < 4 else (x_unit, unit)


def load_access(payloads: Place, settings: Settings, vector: int) -> int:
    """Return ``ACCESS`` of codes.py for reading; only INT6 has more than one."""
    if settings.bits != 6 or payloads.offset % 2:
        return 1
    access = code_access(settings, vector)
    return access if payloads.unit(access) == access and payloads.offset % access == 0 else 1


def store_access(payloads: Place, settings: Settings, vector: int) -> int:
    """Return ``ACCESS`` of codes.py for writing."""
    access = code_access(settings, vector)
    return access if payloads.multiple_of(access) else 1


def scales_aligned(payloads: Place, settings: Settings) -> bool:
    """Whether every scale of every row lies at a multiple of its size."""
    return payloads.multiple_of(2 if settings.scales == "merged_bf16" else 4)


def common(settings: Settings, lanes: int, vector: int, mode: int) -> dict[str, Any]:
    """Return the constants that every kernel takes: ``lanes`` threads hold a block."""
    return {
        "FORMAT": settings.format,
        "BITS": settings.bits,
        "LIMIT": settings.limit,
        "TARGET": settings.target,
        "LOG_LIMIT": settings.log_limit,
        "OFFSET": settings.offset,
        "SCALES": settings.scales,
        "ORDER": settings.order,
        "BLOCK": settings.block,
        "L": lanes,
        "G": 32 * WARPS // lanes,
        "V": vector,
        "MODE": mode,
    }


def writes(payloads: Place, settings: Settings, vector: int) -> dict[str, Any]:
    """Return the constants of a kernel that writes payloads."""
    return {
        "STORE": store_access(payloads, settings, vector),
        "SCALES_ALIGNED": scales_aligned(payloads, settings),
    }


def reads(payloads: Place, settings: Settings, vector: int) -> dict[str, Any]:
    """Return the constants of a kernel that reads payloads."""
    return {
        "PAYLOAD_UNIT": payload_unit(payloads, settings, vector),
        "ALIGNED": scales_aligned(payloads, settings),
        "ACCESS": load_access(payloads, settings, vector),
    }


def encode_shape(
    settings: Settings, dtype: torch.dtype, x: Place, payloads: Place, whole: bool
) -> tuple[bool, int, int, int | None]:
    """Return PAIRS, the lanes, the vector and the limit of registers of ``encode_kernel``."""
    size = dtype.itemsize
    pairs = dtype == torch.bfloat16 and whole and x.stride % 2 == 0 and x.offset % 4 == 0
    wide = settings.bits < 8 and pairs and payloads.multiple_of(4)
    vector = 16 if wide else 16 // size
    few = size == 2 and settings.bits != 6 and settings.block <= 2048 and not settings.random
    registers = ENCODE_REGISTERS if few else None
    return pairs, LANES[size][settings.block], vector, registers


def reduce_shape(settings: Settings, payloads: Place, out: Place) -> tuple[int, int, int | None]:
    """Return lanes, vector and the limit of registers of ``reduce_encode_kernel``."""
    few = payloads.rows <= 4 and settings.bits < 8
    lanes = (LANES[2] if few else MANY_LANES)[settings.block]
    access = 4 if settings.bits == 6 else 2 * settings.bits
    fits = payloads.offset == 0 and payloads.unit(access) == access
    wide = fits and out.offset % 4 == 0 and lanes * 16 <= settings.block
    registers = SUM_REGISTERS if settings.block <= 2048 and not settings.random else None
    return lanes, 16 if wide else 8, registers


def sum_shape(settings: Settings, dtype: torch.dtype) -> tuple[int, int]:
    """Return lanes and vector of ``decode_sum_kernel``."""
    lanes = LANES[4] if dtype.itemsize == 4 else MANY_LANES
    return lanes[settings.block], 16 // dtype.itemsize
