"""Gradient methods with memory on Megatron's buckets: one method a bucket, which takes it whole.

A bucket holds whole parameters, and every rank its own gradients of all of them, so a method gets
matrices by name, with or without the distributed optimiser; with it, the slice that a rank owns is
then a part of the result. The message is that of an all-reduce in either case. Parameters of exact
kinds go in an all-reduce of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco import compressors
from megatron_taco.collectives.traffic import Traffic
from megatron_taco.compressors.counter_random import key_of
from megatron_taco.gradients import METHODS, GradientMethod
from megatron_taco.gradients.messages import ring_bytes
from megatron_taco.patching.data_plans import ModelParameters, Plan, Stream

Make = Callable[[ProcessGroup, str], GradientMethod]
"""Makes the method of one bucket from its group and its name."""

_SEEDED = ("powersgd", "pactrain")


def maker(name: str, settings: dict[str, Any], seed: int) -> Make:
    """Return what makes the method called ``name`` for a bucket.

    Args:
        name: One of ``gradients.METHODS``.
        settings: Of its class; a ``compressor`` as the settings of a block integer.
        seed: Of the run, for methods that draw numbers.
    """
    arguments = dict(settings)
    if "compressor" in arguments:
        arguments["compressor"] = compressors.build("block_integer", **arguments["compressor"])

    def make(group: ProcessGroup, bucket: str) -> GradientMethod:
        own = {"seed": key_of(seed, bucket)} if name in _SEEDED else {}
        return METHODS[name](group, **arguments, **own)

    return make


class BucketMethods:
    """The methods of all buckets of this rank.

    Args:
        stream: Of the gradients; says which kinds are exact.
        model: Knows the parameters' names and kinds.
        make: Makes the method of one bucket.
    """

    def __init__(self, stream: Stream, model: ModelParameters, make: Make) -> None:
        self._stream = stream
        self._model = model
        self._make = make
        self.methods: dict[str, GradientMethod] = {}

    def name(self, bucket: Any, plan: Plan) -> str:
        """Return what identifies a bucket in checkpoints: its plan's name and its elements."""
        numel = sum(stop - start for start, stop in bucket.param_to_index.values())
        return f"{plan.name}:{numel}"

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the memory of the bucket called ``name``; parts `local` and `shared`."""
        return self.methods[name].state_dict()

    def load(self, name: str, state: dict[str, Any]) -> None:
        """Take over the memory of one bucket, whose method has been made."""
        self.methods[name].load_state_dict(state)

    def of(self, bucket: Any, plan: Plan, group: ProcessGroup) -> GradientMethod:
        """Return a bucket's method, made when it is first asked for."""
        name = self.name(bucket, plan)
        if name not in self.methods:
            self.methods[name] = self._make(group, name)
        return self.methods[name]

    @property
    def state_bytes(self) -> int:
        """Bytes of all memory of this rank."""
        return sum(method.state_bytes for method in self.methods.values())

    def reduce(
        self,
        bucket: Any,
        plan: Plan,
        collective: str,
        group: ProcessGroup,
        *,
        step: int,
        average: bool,
    ) -> tuple[dict[str, Traffic], Tensor]:
        """Replace a bucket's gradients by the method's estimate of their sum or mean.

        Args:
            bucket: Megatron's, with FP32, BF16 or FP16 gradients; written in place.
            plan: Of the bucket.
            collective: What Megatron asked for: ``all_reduce`` or ``reduce_scatter``.
            group: The group, of P ranks.
            step: The training step, counted from 0.
            average: Whether the mean is wanted; otherwise the sum.

        Returns:
            What this rank sent, by exact kind and for the method; and how many of its gradients
            hold what is not a number, a 0-dim tensor.
        """
        compressed: dict[str, Tensor] = {}
        exact: list[Tensor] = []
        for parameter, (start, stop) in bucket.param_to_index.items():
            flat = bucket.grad_data[start:stop]
            if self._stream.is_exact(self._model.kind(parameter)):
                exact.append(flat)
            else:
                compressed[self._model.name(parameter)] = flat.view(parameter.shape)
        bad = sum(
            (1 - t.isfinite().all().int() for t in compressed.values()),
            torch.zeros((), dtype=torch.int32, device=bucket.grad_data.device),
        )
        wire = self._by_method(compressed, self.of(bucket, plan, group), group, step, average)
        sum_exactly(exact, group, average)
        return self._sent(plan, collective, group, wire), bad

    @staticmethod
    def _by_method(
        tensors: dict[str, Tensor],
        method: GradientMethod,
        group: ProcessGroup,
        step: int,
        average: bool,
    ) -> int:
        """Run the method on the tensors in place; returns the bytes that this rank sent."""
        # In FP32, so that the sum is rounded once: methods give means.
        work = {name: tensor.float() for name, tensor in tensors.items()}
        wire = method.reduce(work, step).wire
        for name, tensor in tensors.items():
            total = work[name] if average else work[name].mul_(group.size())
            if total is not tensor:
                tensor.copy_(total)
        return wire

    def _sent(
        self, plan: Plan, collective: str, group: ProcessGroup, wire: int
    ) -> dict[str, Traffic]:
        size = group.size()
        plain = plan.traffic(collective, group.rank(), size, compressed=False)
        sent = self._stream.counted(plain)
        for kind, traffic in sent.items():
            if self._stream.is_exact(kind):
                wire_exact = ring_bytes(plan.elements[kind] * plan.itemsize, size)
                sent[kind] = Traffic(traffic.raw, wire_exact)
            else:
                sent[kind] = Traffic(traffic.raw, wire)
        return sent


def sum_exactly(tensors: list[Tensor], group: ProcessGroup, average: bool) -> None:
    """Sum or average tensors of one dtype over a group, in place, in one message."""
    if not tensors:
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(together, group=group)
    if average:
        together /= group.size()
    at = 0
    for tensor in tensors:
        tensor.copy_(together[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
