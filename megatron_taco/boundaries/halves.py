"""The two halves of a projection: down at the end of a stage, up at the start of the next.

    down:  Z = R A        backward:  dR = G_Z A'      dA += R' G_Z     (sender's part)
    up:    Y = Z A'       backward:  G_Z = G A        dA += G' Z       (receiver's part)

A is the master rounded once to the compute dtype, the same tensor forward and backward and at both
ends. The parts of dA go straight into FP32 accumulators of the caller, in the backward pass and
nowhere else: it runs once a micro-batch, however often the forward pass is repeated.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLICE = 4096
"""Tokens that are upcast at a time where no GEMM with a wider output exists."""


def accumulate_outer_(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left' right to ``accumulator``, products and sums in its dtype.

    Args:
        accumulator: FP32 (or FP64) [d, r].
        left: [n, d].
        right: [n, r], of the dtype of ``left``.
    """
    if left.dtype == accumulator.dtype:
        accumulator.addmm_(left.t(), right)
    elif left.is_cuda and accumulator.dtype == torch.float32:
        accumulator.add_(torch.mm(left.t(), right, out_dtype=torch.float32))
    else:
        for at in range(0, left.shape[0], SLICE):
            wide = left[at : at + SLICE].to(accumulator.dtype)
            accumulator.addmm_(wide.t(), right[at : at + SLICE].to(accumulator.dtype))


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, accumulator: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if accumulator is None else x, a)
        ctx.accumulator = accumulator
        return torch.matmul(x, a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, a = ctx.saved_tensors
        if x is not None:
            accumulate_outer_(ctx.accumulator, _rows(x), _rows(gradient))
        return torch.matmul(gradient, a.t()), None, None


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, a: Tensor, accumulator: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if accumulator is None else z, a)
        ctx.accumulator = accumulator
        return torch.matmul(z, a.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        z, a = ctx.saved_tensors
        if z is not None:
            accumulate_outer_(ctx.accumulator, _rows(gradient), _rows(z))
        return torch.matmul(gradient, a), None, None


def project_down(x: Tensor, a: Tensor, accumulator: Tensor | None) -> Tensor:
    """Return x A: [s, b, r].

    Args:
        x: Residual [s, b, d]; it has to require a gradient for dA to be accumulated.
        a: Rounded projector [d, r], of the dtype of ``x``; no gradient flows into it.
        accumulator: Where the backward pass adds x' G_Z, FP32 [d, r]; None to leave dA out.
    """
    z: Tensor = _Down.apply(x, a, accumulator)
    return z


def project_up(z: Tensor, a: Tensor, accumulator: Tensor | None) -> Tensor:
    """Return z A': [s, b, d].

    Args:
        z: What arrived [s, b, r]; it has to require a gradient for dA to be accumulated.
        a: Rounded projector [d, r], of the dtype of ``z``; no gradient flows into it.
        accumulator: Where the backward pass adds G' z, FP32 [d, r]; None to leave dA out.
    """
    y: Tensor = _Up.apply(z, a, accumulator)
    return y


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
