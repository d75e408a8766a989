"""Sums of payloads before the inverse transform, which is linear and the same for all of them."""

from __future__ import annotations

from torch import Tensor

from megatron_taco.compressors.formats import CodeFormat
from megatron_taco.compressors.scales import common_exponent, floor_exponents, relative_scale


def rotated_sum(
    q: Tensor, scale: Tensor, alpha: Tensor | None, code: CodeFormat
) -> tuple[Tensor, Tensor]:
    """Return FP32 z [B, g] and e [g]: the sum over the rows, rotated, is z * 2^e.

    Args:
        q: Values of the codes, FP32 [B, P * g]; used up.
        scale: c, or s if ``alpha`` is given, FP32 [P, g].
        alpha: Second scales [P, g].
        code: Format of the codes.
    """
    e = common_exponent(floor_exponents(scale, alpha), code.limit)
    relative = relative_scale(scale, alpha, e.unsqueeze(0))
    offset = code.offset
    if offset:
        q.add_(offset)
    terms = q.view(q.shape[0], *scale.shape).mul_(relative)
    total = terms[:, 0].contiguous()
    if offset:
        total += in_order(relative) * -offset
    for rank in range(1, scale.shape[0]):
        total = total + terms[:, rank]
    return total, e


def in_order(rows: Tensor) -> Tensor:
    """Return the sum of FP32 [P, n] over P, one after the other: [n]."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total
