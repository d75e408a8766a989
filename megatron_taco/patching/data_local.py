"""Replicas that take steps of their own: SparseLoCo in Megatron's loop.

In a local step no gradient is reduced between replicas. Megatron's gradients come out as if all
replicas had this one's: it scales them by 1/P for a sum over P, so that sum is made of P equal
ones. Clipping and the optimiser then see what a run of this replica alone would.

After every H-th step the method exchanges what has changed of the FP32 master weights since the
last exchange, one bucket after the other; all replicas then hold the same masters, and the model's
weights are rounded from them. Exact kinds (norms, and what two ranks of one replica hold copies of,
which have to stay equal) are averaged exactly. Moments of the optimiser stay each replica's own.

So a checkpoint has of each replica the masters and the moments, beside the method's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.traffic import Traffic
from megatron_taco.gradients.messages import ring_bytes
from megatron_taco.gradients.sparseloco import SparseLoCo
from megatron_taco.patching.data_methods import BucketMethods, Make, sum_exactly
from megatron_taco.patching.data_plans import ModelParameters, Plan, Stream
from megatron_taco.patching.errors import PatchError

Buckets = Callable[[], Iterator[tuple[Any, Plan, ProcessGroup]]]
OnSent = Callable[[str, int], None]
"""Told the kind and how many bytes of it this rank sent."""

_MASTER = "master"


class LocalSteps(BucketMethods):
    """The local and the outer steps of one rank.

    Args:
        stream: Of the gradients.
        model: Knows the parameters' names and kinds.
        make: Makes the method of one bucket.
        rounds: H.
        buckets: Gives all buckets of this rank.
        on_sent: Told what an outer step sends.
    """

    def __init__(
        self,
        stream: Stream,
        model: ModelParameters,
        make: Make,
        *,
        rounds: int,
        buckets: Buckets,
        on_sent: OnSent,
    ) -> None:
        super().__init__(stream, model, make)
        self._rounds = rounds
        self._buckets = buckets
        self._on_sent = on_sent
        self._optimizers: list[Any] = []
        self._masters: dict[int, tuple[Tensor, Tensor]] = {}
        self._round_began = False

    def attach(self, optimizer: Any) -> None:
        """Get to know Megatron's optimiser; done again, it does nothing."""
        chain = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        if chain == self._optimizers:
            return
        self._optimizers, self._masters = chain, {}
        for one in chain:
            for model, master in _pairs(one):
                self._masters[id(model)] = (model, master)

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
        """Leave a bucket's gradients this rank's own; see the module and the base class."""
        if not average:
            bucket.grad_data *= group.size()
        plain = plan.traffic(collective, group.rank(), group.size(), compressed=False)
        sent = {kind: Traffic(traffic.raw, 0) for kind, traffic in plain.items()}
        return sent, torch.zeros((), dtype=torch.int32, device=bucket.grad_data.device)

    def begin_step(self, step: int) -> None:
        """Before a step, counted from 0: note what the first round starts from."""
        if self._round_began or step < self._stream.start_step:
            return
        self._round_began = True
        for bucket, plan, group in self._buckets():
            method = self._of(bucket, plan, group)
            if not method.has_begun:
                method.begin(self._compressed(bucket))

    def end_step(self, step: int) -> None:
        """After a step: exchange, if it was the last one of a round."""
        if step < self._stream.start_step or not self.ends_round(step):
            return
        for bucket, plan, group in self._buckets():
            tensors = self._compressed(bucket)
            if tensors:
                sent = self._of(bucket, plan, group).reduce(tensors, step)
                self._on_sent(str(self._stream.method), sent.wire)
            self._average_exactly(bucket, group)
            for model, master in self._of_bucket(bucket):
                if model is not master:
                    model.data.copy_(master.data)

    def ends_round(self, step: int) -> bool:
        """Tell whether all replicas hold the same weights after a step."""
        done = step + 1 - self._stream.start_step
        return done <= 0 or done % self._rounds == 0

    def _average_exactly(self, bucket: Any, group: ProcessGroup) -> None:
        kinds: dict[str, int] = {}
        exact = []
        for model, master in self._of_bucket(bucket):
            kind = self._model.kind(model)
            if self._stream.is_exact(kind):
                exact.append(master.data)
                kinds[kind] = kinds.get(kind, 0) + master.numel() * master.element_size()
        sum_exactly(exact, group, average=True)
        for kind, nbytes in kinds.items():
            self._on_sent(kind, ring_bytes(nbytes, group.size()))

    def _of(self, bucket: Any, plan: Plan, group: ProcessGroup) -> SparseLoCo:
        method = self.of(bucket, plan, group)
        assert isinstance(method, SparseLoCo)
        return method

    def _of_bucket(self, bucket: Any) -> list[tuple[Tensor, Tensor]]:
        """Weights of the model and FP32 masters; the same where the model is in FP32."""
        missing = [p for p in bucket.param_to_index if id(p) not in self._masters]
        if missing:
            raise PatchError(
                "compression.data_parallel.gradients.compressor: sparseloco: no optimiser of "
                f"Megatron's has the parameter {self._model.name(missing[0])}; freeze no "
                "parameters, or choose another compressor"
            )
        return [self._masters[id(parameter)] for parameter in bucket.param_to_index]

    def _compressed(self, bucket: Any) -> dict[str, Tensor]:
        """Masters of a bucket that are not exact, by name."""
        return {
            self._model.name(model): master.data
            for model, master in self._of_bucket(bucket)
            if not self._stream.is_exact(self._model.kind(model))
        }

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the memory of a bucket, with this replica's masters and moments."""
        state = super().state_of(name)
        for bucket, plan, _ in self._buckets():
            if self.name(bucket, plan) == name:
                for key, tensor in self._own(bucket):
                    state["local"][key] = tensor.detach().clone()
        return state

    def load(self, name: str, state: dict[str, Any]) -> None:
        """Take over the memory of a bucket, and this replica's masters and moments."""
        for bucket, plan, _ in self._buckets():
            if self.name(bucket, plan) != name:
                continue
            for key, tensor in self._own(bucket):
                tensor.copy_(state["local"].pop(key))
            for model, master in self._of_bucket(bucket):
                if model is not master:
                    model.data.copy_(master.data)
        super().load(name, state)

    def _own(self, bucket: Any) -> Iterator[tuple[str, Tensor]]:
        """Masters and moments of a bucket, by name."""
        for model, master in self._of_bucket(bucket):
            name = self._model.name(model)
            yield f"{_MASTER}:{name}", master.data
            for one in self._optimizers:
                for key, value in one.optimizer.state.get(master, {}).items():
                    if isinstance(value, Tensor) and value.shape == master.shape:
                        yield f"{key}:{name}", value


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight of one of Megatron's optimisers with its FP32 master."""
    if hasattr(optimizer, "float16_groups"):
        for models, masters in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
        ):
            yield from zip(models, masters, strict=True)
        for group in optimizer.fp32_from_fp32_groups:
            yield from zip(group, group, strict=True)
        return
    for group in optimizer.param_groups:
        yield from zip(group["params"], group["params"], strict=True)
