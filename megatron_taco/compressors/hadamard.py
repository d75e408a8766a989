"""The block transform: orthonormal Sylvester (natural order) Hadamard, in one fixed order.

The order of the butterflies is part of the definition of the code: FP32 addition is not
associative, so another order would give other codes.
"""

from math import sqrt

import torch
from torch import Tensor


def butterflies_(columns: Tensor, order: int | None = None) -> Tensor:
    """Transform each T consecutive elements of columns FP32 [B, N]: (I (x) H_T) x, not normalised.

    For h = 1, 2, 4 .. T/2 in this order every pair (a, b) of elements i and i + h, i having bit
    h clear, becomes (a + b, a - b), each one FP32 operation.

    Args:
        columns: Contiguous, B a power of two; used as scratch, its contents are lost.
        order: T, a power of two, at most B, which is the default.

    Returns:
        The transformed columns [B, N], in ``columns`` itself or in a new tensor.
    """
    block, count = columns.shape
    order = block if order is None else order
    if order == 1:
        return columns
    source, target = columns, torch.empty_like(columns)
    h = 1
    while h < order:
        pairs = source.view(block // (2 * h), 2, h * count)
        result = target.view(block // (2 * h), 2, h * count)
        torch.add(pairs[:, 0], pairs[:, 1], out=result[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=result[:, 1])
        source, target = target, source
        h *= 2
    return source


def hadamard_(columns: Tensor) -> Tensor:
    """As ``butterflies_``, then one FP32 product with 1/sqrt(B): H_B x / sqrt(B), its own inverse.

    Args:
        columns: Contiguous; used as scratch, its contents are lost.

    Returns:
        The transformed columns [B, N], in ``columns`` itself or in a new tensor.
    """
    return butterflies_(columns).mul_(1.0 / sqrt(columns.shape[0]))


def sum_of_squares(columns: Tensor) -> Tensor:
    """Return the sum of squares of each column of FP32 [B, N], B >= 4: FP32 [N], in a fixed order.

    Each square is rounded to FP32 (no fused multiply-add); four neighbours are added one after
    the other; then for h = 1, 2, 4 .. sum i of these takes sum i + h on, i a multiple of 2h.
    (Squares of BF16 and FP16 numbers are exact, so there a fused multiply-add gives the same.)
    """
    squares = columns.square().view(-1, 4, columns.shape[1])
    total = squares[:, 0] + squares[:, 1] + squares[:, 2] + squares[:, 3]
    while total.shape[0] > 1:
        total = total[0::2] + total[1::2]
    return total[0]
