"""Blocks as columns, and exact powers of two.

Inside a compressor a batch of N blocks of B elements is an FP32 matrix [B, N], *block elements
first*: element i of every block is one contiguous run of N, so that a butterfly of any stride,
a reduction over a block and the packing of neighbouring codes are all plain vector operations.
"""

import torch
from torch import Tensor

# 2^-e and 2^e are both normal FP32 numbers for every exponent in this range.
MIN_EXPONENT = -100
MAX_EXPONENT = 126


def block_count(numel: int, block: int) -> int:
    """Return how many blocks hold ``numel`` elements; the last one may be partly padding."""
    return -(-numel // block)


def to_columns(x: Tensor, block: int) -> Tensor:
    """Cut each row of ``x`` [R, n] into g = ceil(n / B) blocks: FP32 [B, R * g].

    Column r * g + j is block j of row r. The last block of a row is padded with zeros. The
    result may share memory with ``x``: it is not to be written to.
    """
    rows, numel = x.shape
    padded = block_count(numel, block) * block
    if padded != numel:
        x = torch.nn.functional.pad(x, (0, padded - numel))
    return x.reshape(rows * padded // block, block).t().contiguous().float()


def from_columns(columns: Tensor, rows: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Undo ``to_columns``: FP32 [B, R * g] to [R, numel] of ``dtype``, padding dropped.

    The cast is a plain one: what is beyond the range of ``dtype`` becomes infinite.
    """
    values = columns.to(dtype).t().contiguous().view(rows, -1)
    return values[:, :numel].contiguous()


def absolute_maximum(columns: Tensor) -> Tensor:
    """Return max |x| of each column of [B, N]: [N]. A NaN in the column gives NaN."""
    return columns.abs().amax(0)


def floor_exponent(x: Tensor) -> Tensor:
    """Return floor(log2 x) of FP32 ``x`` >= 0 from its exponent bits: int32.

    Zeros and subnormals give -127; infinities and NaN give 128.
    """
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent, exactly, for int32 exponents in [-126, 127]: FP32."""
    return ((exponent + 127) << 23).view(torch.float32)


def clamp_exponent(exponent: Tensor) -> Tensor:
    """Limit block exponents to the range in which both 2^e and 2^-e are normal."""
    return exponent.clamp(MIN_EXPONENT, MAX_EXPONENT)
