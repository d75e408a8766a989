"""Sends each collective of a known role compressed or plain, and counts it.

The one place where a call meets the run's settings: whether its role is on, whether it is large
enough, and whether ``start_step`` has come.  The answer depends on settings, sizes and the step
alone, so all ranks of a group give the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.all_gather import all_gather
from megatron_taco.collectives.all_reduce import all_reduce, choose_algorithm
from megatron_taco.collectives.nodes import NodeGroups, Topology
from megatron_taco.collectives.reduce_scatter import reduce_scatter
from megatron_taco.collectives.traffic import traffic
from megatron_taco.compressors import Compressor

Plain = Callable[[], Any]


class FlowCounter(Protocol):
    """What the router tells a counter of one flow."""

    seen: int
    small: int
    compressed: int
    raw: int
    wire: int
    largest: int

    def add_nonfinite(self, blocks: Tensor) -> None:
        """Add a 0-dim count of blocks that held a NaN or an Inf."""

    def add_error(self, exact: Tensor, decoded: Tensor) -> None:
        """Add one sample of the codec's error."""


@dataclass(kw_only=True)
class Router:
    """Routes the collectives of one parallel axis.

    Attributes:
        compressor: encodes every compressed message.
        algorithm: ``auto``, ``one_shot``, ``two_shot`` or ``hierarchical``, for all-reduce.
        roles: the roles that are on; all others go plain.
        min_bytes: messages below this size in bytes go plain.
        start_step: first step, counted from 0, that is compressed.
        step: the step that runs now; the training loop sets it.
        sampling: whether errors are sampled in this step.
        counter: gives the counter of a role's collective.
        topology: knows how the ranks of a group lie on nodes.
    """

    compressor: Compressor
    algorithm: str
    roles: frozenset[str]
    min_bytes: int
    start_step: int
    counter: Callable[[str, str], FlowCounter]
    step: int = 0
    sampling: bool = False
    topology: Topology = field(default_factory=Topology)

    def _nodes(self, group: ProcessGroup) -> NodeGroups | None:
        """The sub-groups of a group that spans nodes; its first use is collective."""
        if self.algorithm == "hierarchical":
            return self.topology.require(group)
        return self.topology.of(group) if self.algorithm == "auto" else None

    def _plan(self, role: str, collective: str, tensor: Tensor) -> tuple[FlowCounter, bool]:
        """Count the call; tell whether it goes compressed."""
        count = self.counter(role, collective)
        size = tensor.numel() * tensor.element_size()
        count.seen += 1
        count.largest = max(count.largest, size)
        if role not in self.roles or self.step < self.start_step:
            return count, False
        if size < self.min_bytes:
            count.small += 1
            return count, False
        count.compressed += 1
        return count, True

    def _account(
        self,
        count: FlowCounter,
        collective: str,
        tensor: Tensor,
        group: ProcessGroup,
        compressed: bool,
    ) -> None:
        world = group.size()
        algorithm, nodes = "one_shot", 1
        if compressed and collective == "all_reduce":
            groups = self._nodes(group)
            nodes = 1 if groups is None else groups.count
            algorithm = choose_algorithm(world, self.algorithm, nodes=nodes)
        sent = traffic(
            collective,
            algorithm,
            tensor.numel(),
            tensor.element_size(),
            world,
            self.compressor.payload_bytes,
            block=self.compressor.block,
            nodes=nodes,
        )
        count.raw += sent.raw
        count.wire += sent.wire if compressed else sent.raw

    def _observer(self, count: FlowCounter) -> Callable[[Tensor, int], None]:
        def on_payload(payloads: Tensor, numel: int) -> None:
            count.add_nonfinite(self.compressor.nonfinite_blocks(payloads, numel))

        return on_payload

    @torch.no_grad()
    def _sample(self, count: FlowCounter, tensor: Tensor) -> None:
        if self.sampling:
            exact = tensor.detach().reshape(-1)
            payload = self.compressor.encode(exact)
            decoded = self.compressor.decode(payload, exact.shape, torch.float32)
            count.add_error(exact.float(), decoded)

    def _route(
        self,
        role: str,
        collective: str,
        whole: Tensor,
        sent: Tensor,
        group: ProcessGroup,
        plain: Plain,
        compressed: Callable[[Callable[[Tensor, int], None]], Any],
    ) -> Any:
        """Count a call, then send it one way or the other.

        Args:
            role: its role.
            collective: its name.
            whole: the whole tensor, whose size counts.
            sent: what this rank encodes.
            group: the process group.
            plain: sends it plain.
            compressed: sends it compressed, given the observer of its payloads.
        """
        count, compresses = self._plan(role, collective, whole)
        self._account(count, collective, whole, group, compresses)
        if not compresses:
            return plain()
        self._sample(count, sent)
        return compressed(self._observer(count))

    def all_reduce(
        self, role: str, tensor: Tensor, group: ProcessGroup, async_op: bool, plain: Plain
    ) -> Any:
        """Sum ``tensor`` over ``group`` in place; see :func:`collectives.all_reduce`."""
        return self._route(
            role,
            "all_reduce",
            tensor,
            tensor,
            group,
            plain,
            lambda observer: all_reduce(
                tensor,
                group=group,
                compressor=self.compressor,
                algorithm=self.algorithm,
                nodes=self._nodes(group),
                async_op=async_op,
                on_payload=observer,
            ),
        )

    def reduce_scatter(
        self,
        role: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        plain: Plain,
    ) -> Any:
        """Sum ``input`` over ``group`` and keep this rank's slice in ``output``."""
        send = partial(self._send, reduce_scatter, output, input, group, async_op)
        return self._route(role, "reduce_scatter", input, input, group, plain, send)

    def all_gather(
        self,
        role: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        plain: Plain,
    ) -> Any:
        """Gather every rank's ``input`` into ``output``; its own slice is the decoded one."""
        send = partial(self._send, all_gather, output, input, group, async_op)
        return self._route(role, "all_gather", output, input, group, plain, send)

    def _send(
        self,
        collective: Callable[..., Any],
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        observer: Callable[[Tensor, int], None],
    ) -> Any:
        return collective(
            output,
            input,
            group=group,
            compressor=self.compressor,
            async_op=async_op,
            on_payload=observer,
        )
