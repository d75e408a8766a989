"""Overlap of the forward pass: a linear's product is made, sent and received in token chunks.

Megatron's row-parallel linear multiplies all tokens and then sums the product over the ranks; its
column-parallel linear, under sequence parallelism, gathers all tokens and then multiplies.  Here,
while such a linear runs forward,

* the ``torch.matmul`` of a row-parallel linear fills its product chunk by chunk, and chunk ``i``
  travels while chunk ``i+1`` is multiplied; the all-reduce or reduce-scatter that Megatron then
  asks for finds its messages under way and only waits for them;
* the all-gather of a column-parallel linear begins with one chunk, and the ``torch.matmul`` that
  follows multiplies each chunk as it arrives, the next one being on its way.

Nothing else changes: the autograd function that Megatron runs saves the whole input and its
backward pass is one product for the input's gradient and one for the weight's, as without chunks.

Under sequence parallelism a rank's slice has to stay its own tokens, so chunk ``i`` is the ``i``-th
part of every rank's slice.  Chunks end where the compressor's blocks end: the codes are those of
the unchunked message.  At most two chunks are under way, and a chunk is awaited only after the
next one's message was launched: with CUDA_DEVICE_MAX_CONNECTIONS=1 a launch that waits blocks all
later ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.parts import SendPart, part_ranges
from megatron_taco.collectives.router import Router
from megatron_taco.patching.overlap_chunks import (
    PendingGather,
    PendingSum,
    Product,
    plain_product,
    same_memory,
    slices,
)
from megatron_taco.patching.scope import Scope

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


class OverlapError(RuntimeError):
    """A linear's chunks are under way and the collective that they belong to never came."""


@dataclass
class _Linear:
    """The linear that runs forward in this thread.

    Attributes:
        name: for messages.
        collective: what it does in its forward pass.
        group: its tensor-parallel group.
        pending: what is under way.
    """

    name: str
    collective: Collective
    group: ProcessGroup
    pending: PendingSum | PendingGather | None = None


class _State(threading.local):
    linear: _Linear | None = None


class ForwardOverlap:
    """Makes, sends and receives in chunks; the hooks of the tensor-parallel seam call it.

    Args:
        router: decides and sends.
        scope: knows the role of what is sent.
        chunks: how many chunks, 2 or more.
        accepts: whether a tensor summed or gathered over a group is one that may be compressed.
    """

    def __init__(
        self,
        router: Router,
        scope: Scope,
        chunks: int,
        accepts: Callable[[Tensor, Any], bool],
    ) -> None:
        self._router = router
        self._scope = scope
        self._chunks = chunks
        self._accepts = accepts
        self._state = _State()

    @contextlib.contextmanager
    def row(self, linear: Any) -> Iterator[None]:
        """A ``RowParallelLinear`` runs forward."""
        if linear.explicit_expert_comm:
            yield
            return
        collective: Collective = "reduce_scatter" if linear.sequence_parallel else "all_reduce"
        with self._running(_Linear("RowParallelLinear", collective, linear.tp_group)):
            yield

    @contextlib.contextmanager
    def column(self, linear: Any) -> Iterator[None]:
        """A ``ColumnParallelLinear`` runs forward."""
        if linear.explicit_expert_comm or not linear.sequence_parallel:
            yield
            return
        with self._running(_Linear("ColumnParallelLinear", "all_gather", linear.tp_group)):
            yield

    @contextlib.contextmanager
    def _running(self, linear: _Linear) -> Iterator[None]:
        saved, self._state.linear = self._state.linear, linear
        try:
            yield
        finally:
            self._state.linear = saved
        if linear.pending is not None:
            raise OverlapError(
                f"compression.tensor_parallel.forward_chunks: {linear.name}.forward has returned "
                f"without the {linear.collective} that its chunks belong to; "
                "set forward_chunks: 1"
            )

    def matmul(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the ``torch.matmul`` of ``layers``, which makes a linear's product in chunks."""

        def matmul(input: Tensor, other: Tensor, **options: Any) -> Any:
            linear = self._state.linear
            if linear is None or options:
                return original(input, other, **options)
            if isinstance(linear.pending, PendingGather):
                return self._multiply_gathered(linear, linear.pending, original, input, other)
            if linear.collective == "all_gather" or linear.pending is not None:
                return original(input, other)
            product = self._multiply_and_send(linear, input, other)
            return original(input, other) if product is None else product

        return matmul

    def begin_all_gather(self, output: Tensor, input: Tensor, group: Any) -> bool:
        """Begin a column-parallel linear's all-gather; False where it is to be done as a whole."""
        linear = self._state.linear
        if linear is None or linear.collective != "all_gather" or linear.pending is not None:
            return False
        if group is not linear.group or not output.is_contiguous() or input.dim() != 3:
            return False
        ranges = self._ranges(linear, input)
        send = self._begin(linear, output, ranges)
        if send is None:
            return False
        size = linear.group.size()
        linear.pending = PendingGather(
            gathered=output, input=input, ranges=ranges, size=size, send=send
        )
        linear.pending.begin_next()
        return True

    def finish_all_reduce(self, tensor: Tensor) -> bool:
        """Wait for the chunks of a product; False if they are not under way."""
        return self._finish("all_reduce", tensor) is not None

    def finish_reduce_scatter(self, output: Tensor, input: Tensor) -> bool:
        """Wait for the chunks of a product's slice; False if they are not under way."""
        result = self._finish("reduce_scatter", input)
        if result is None:
            return False
        output.copy_(result.view(output.shape))
        return True

    def _finish(self, collective: Collective, product: Tensor) -> Tensor | None:
        linear = self._state.linear
        if linear is None or linear.collective != collective:
            return None
        pending = linear.pending
        if not isinstance(pending, PendingSum) or not same_memory(pending.product, product):
            return None
        if pending.last is not None:
            pending.last.wait()
        linear.pending = None
        return pending.result

    def _begin(
        self, linear: _Linear, whole: Tensor, ranges: list[tuple[int, int]]
    ) -> SendPart | None:
        """What sends a linear's chunks; None where its collective is to be done as a whole."""
        role = self._scope.role_of_a("forward")
        if role is None or len(ranges) < 2 or not self._accepts(whole, linear.group):
            return None
        return self._router.parts(role, linear.collective, whole, linear.group)

    def _ranges(self, linear: _Linear, slice_: Tensor) -> list[tuple[int, int]]:
        """The tokens of a rank's slice, chunk by chunk: [s, b, n] of an all-reduce is one slice."""
        rows = slice_.shape[0]
        elements = slice_.numel() // rows if rows else 0
        unit = self._router.compressor.block
        if linear.collective == "all_reduce":
            unit *= linear.group.size()  # a two-shot's slices are whole blocks: none is padded
        return part_ranges(rows, elements, unit, self._chunks)

    def _multiply_and_send(self, linear: _Linear, input: Tensor, other: Tensor) -> Tensor | None:
        """Make a row-parallel linear's product in chunks; None where it is to be made whole."""
        size = linear.group.size() if linear.collective == "reduce_scatter" else 1
        if not plain_product(input, other) or input.shape[0] % size:
            return None
        product = input.new_empty(*input.shape[:-1], other.shape[1])
        sliced = slices(product, size)
        ranges = self._ranges(linear, sliced[0])
        send = self._begin(linear, product, ranges)
        if send is None:
            return None
        scatters = linear.collective == "reduce_scatter"
        result = torch.empty_like(sliced[0]) if scatters else product
        linear.pending = pending = PendingSum(product=product, result=result)
        multiply = Product(input.contiguous(), other, product, size)
        for first, last in ranges:
            multiply(first, last)
            chunk = sliced[:, first:last]
            if scatters:
                work = send(result[first:last].view(-1), chunk.view(size, -1))
            else:
                work = send(chunk[0], chunk[0])
            if pending.last is not None:
                pending.last.wait()
            pending.last = work
        return product

    @staticmethod
    def _multiply_gathered(
        linear: _Linear,
        pending: PendingGather,
        original: Callable[..., Any],
        input: Tensor,
        other: Tensor,
    ) -> Any:
        """Multiply what is being gathered, a chunk at a time where that is a plain product."""
        if not same_memory(pending.gathered, input):
            raise OverlapError(
                f"compression.tensor_parallel.forward_chunks: {linear.name} multiplies something "
                "else than what it gathers; set forward_chunks: 1"
            )
        if plain_product(input, other):
            product = input.new_empty(*input.shape[:-1], other.shape[1])
            multiply = Product(input, other, product, linear.group.size())
            for first, last in pending.chunks():
                multiply(first, last)
        else:
            for _ in pending.chunks():
                pass
            product = original(input, other)
        linear.pending = None
        return product
