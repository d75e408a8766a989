"""Data-parallel methods with memory: what they have in common.

A compressor is stateless and replaces the payload of a collective. The methods here are more than
that: they keep residuals, bases or masks from step to step, choose their own collectives and may
exchange sizes first. What they owe all the same: every rank of the group ends with the same bits,
the same input and state give the same bytes, and a NaN that goes in comes out on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.traffic import Traffic
from megatron_taco.gradients.messages import Channel, flatten, ring_bytes, write_back


class GradientMethod(ABC):
    """Averages tensors over a data-parallel group, with memory.

    A subclass implements :meth:`_reduce` and keeps what it has to remember in two mappings, which
    make up its state: ``_local`` differs from rank to rank (residuals), ``_shared`` has the same
    bits on all ranks (bases, masks).

    Attributes:
        name: What the configuration calls the method.
        operates_on: ``gradients``, once a step before the optimiser, or ``parameters``, once a step
            after it.
        start_step: The first step, counted from 0, in which the method is at work; before it
            tensors are averaged exactly.
    """

    name: ClassVar[str]
    operates_on: ClassVar[Literal["gradients", "parameters"]] = "gradients"

    def __init__(self, group: ProcessGroup, *, start_step: int = 0) -> None:
        """Starts without memory.

        Args:
            group: The data-parallel group.
            start_step: See the class.

        Raises:
            ValueError: ``start_step`` is negative.
        """
        if start_step < 0:
            raise ValueError(f"{self.name}: start_step is {start_step}, allowed is 0 or more")
        self.start_step = start_step
        self._channel = Channel(group)
        self._local: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}

    def reduce(self, tensors: Mapping[str, Tensor], step: int) -> Traffic:
        """Replaces every tensor by the method's estimate of its mean over the group.

        Args:
            tensors: FP32, BF16 or FP16, by name, dense; the same names, shapes and order on all
                ranks and in every step. Written in place, rounded from FP32 once.
            step: The training step, counted from 0.

        Returns:
            The bytes that this rank sent, and those of a plain ring all-reduce.
        """
        raw = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        before = self._channel.wire
        with torch.no_grad():
            if step < self.start_step:
                self._average(tensors)
            else:
                self._reduce(tensors, step)
        return Traffic(ring_bytes(raw, self._channel.size), self._channel.wire - before)

    @abstractmethod
    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Does the work of :meth:`reduce` from ``start_step`` on."""

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        """Averages exactly, in one FP32 message."""
        if tensors:
            write_back(self._channel.mean_(flatten(tensors.values())), tensors)

    @property
    def state_bytes(self) -> int:
        """Bytes of all memory of this rank."""
        tensors = [*self._local.values(), *self._shared.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """Returns all memory: on loading it, training goes on as if it had not stopped."""
        return {
            "method": self.name,
            "world_size": self._channel.size,
            "rank": self._channel.rank,
            "local": {name: tensor.clone() for name, tensor in self._local.items()},
            "shared": {name: tensor.clone() for name, tensor in self._shared.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the memory of the same rank of a group of the same size.

        State that all ranks share can be loaded by a group of another size; residuals cannot,
        since each belongs to one rank's data.

        Raises:
            ValueError: The state is another method's, another rank's, or holds residuals of a
                group of another size.
        """
        if state["method"] != self.name:
            raise ValueError(f"{self.name}: the state is of method {state['method']!r}")
        found = (state["rank"], state["world_size"])
        here = (self._channel.rank, self._channel.size)
        if state["local"] and found != here:
            names = ", ".join(sorted(state["local"])[:3])
            raise ValueError(
                f"{self.name}: the state is of rank {found[0]} of {found[1]} and this is rank "
                f"{here[0]} of {here[1]}: residuals ({names}, ...) belong to one rank's data and "
                "cannot be spread anew; resume at the same data-parallel size, or start the "
                "method's memory afresh"
            )
        self._local = {name: tensor.clone() for name, tensor in state["local"].items()}
        self._shared = {name: tensor.clone() for name, tensor in state["shared"].items()}

    def _with_residual(self, name: str, gradient: Tensor) -> Tensor:
        """Returns FP32 gradient + residual, the residual being 0 at first; a new tensor."""
        values = gradient.detach().float()
        residual = self._local.get(name)
        return values.clone() if residual is None else values + residual

    def _keep_residual(self, name: str, left: Tensor) -> None:
        """Keeps what was not sent; where it is no number, the old residual stays."""
        old = self._local.get(name)
        self._local[name] = keep_finite(left, old)


def keep_finite(new: Tensor, old: Tensor | None) -> Tensor:
    """Returns ``new`` where it is finite, else ``old`` (0 if None).

    A NaN is sent, and Megatron skips the step; memory that took it in would give NaN ever after.
    """
    return torch.where(new.isfinite(), new, 0.0 if old is None else old)
