"""Sends each collective of a known role compressed or plain, and counts it.

The one place where a call meets the run's settings: whether its role is on, whether it is large
enough, whether ``start_step`` has come, and what the policy says.  The answer depends on settings,
sizes and the step alone, so all ranks of a group give the same one.

What depends on a call's role, collective and size alone is worked out once and looked up after
that: a call that goes plain costs a few microseconds and no work on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.all_gather import all_gather
from megatron_taco.collectives.all_reduce import all_reduce, choose_algorithm
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.nodes import NodeGroups, Topology
from megatron_taco.collectives.parts import SendPart
from megatron_taco.collectives.peers import PeerMemory
from megatron_taco.collectives.policy import Policy
from megatron_taco.collectives.reduce_scatter import reduce_scatter
from megatron_taco.collectives.traffic import Traffic, buffer_bytes, traffic
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor

Plain = Callable[[], Any]


class Watcher(Protocol):
    """What the router tells about the cost of compressed calls."""

    def timed(self) -> AbstractContextManager[None]:
        """Count the time spent inside."""

    def called(self, buffers: int) -> None:
        """Note a compressed call whose messages take so many bytes."""

    def watched(self, handle: Any) -> Any:
        """Return the handle with its ``wait`` counted."""


class FlowCounter(Protocol):
    """What the router tells a counter of one flow."""

    seen: int
    small: int
    by_policy: int
    compressed: int
    raw: int
    wire: int
    largest: int

    def add_nonfinite(self, blocks: Tensor) -> None:
        """Add a 0-dim count of blocks that held a NaN or an Inf."""

    def add_error(self, exact: Tensor, decoded: Tensor) -> None:
        """Add one sample of the codec's error."""


class Message(NamedTuple):
    """What decides about a call: its role and collective, the whole plain tensor, the group."""

    role: str
    collective: str
    numel: int
    itemsize: int
    group: ProcessGroup

    @property
    def nbytes(self) -> int:
        """Size of the whole plain tensor in bytes."""
        return self.numel * self.itemsize


class _Plan(NamedTuple):
    """What is the same in all calls of one kind of message."""

    counter: FlowCounter
    nbytes: int
    on: bool
    small: bool
    by_policy: bool
    traffic: Traffic
    buffers: int


_STEPPING: Final = frozenset({"step", "sampling"})
"""Attributes that no plan depends on."""


@dataclass(kw_only=True)
class Router:
    """Routes the collectives of one parallel axis.

    Attributes:
        compressor: encodes every compressed message.
        algorithm: ``auto``, ``one_shot``, ``two_shot``, ``hierarchical`` or ``peer_read``, for
            all-reduce.
        roles: the roles that are on; all others go plain.
        min_bytes: messages below this size in bytes go plain.
        start_step: first step, counted from 0, that is compressed.
        counter: gives the counter of a role's collective, always the same one.
        policy: decides which of the messages that are on and large enough go compressed; without
            one all do.
        step: the step that runs now; the training loop sets it.
        sampling: whether errors are sampled in this step.
        topology: knows how the ranks of a group lie on nodes.
        peers: holds the memory that ``peer_read`` reads.
        watcher: is told what compressed calls cost, or None.
    """

    compressor: Compressor
    algorithm: str
    roles: frozenset[str]
    min_bytes: int
    start_step: int
    counter: Callable[[str, str], FlowCounter]
    policy: Policy | None = None
    step: int = 0
    sampling: bool = False
    topology: Topology = field(default_factory=Topology)
    peers: PeerMemory = field(default_factory=PeerMemory)
    watcher: Watcher | None = None
    _plans: dict[Message, _Plan] = field(default_factory=dict, init=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in _STEPPING and name != "_plans":
            object.__setattr__(self, "_plans", {})

    @property
    def messages(self) -> tuple[Message, ...]:
        """The kinds of messages seen since the settings last changed."""
        return tuple(self._plans)

    def nodes(self, group: ProcessGroup) -> NodeGroups | None:
        """The sub-groups of a group that spans nodes, for all-reduce; its first use is collective.

        Raises:
            ValueError: ``hierarchical`` is asked for and does not fit the group.
        """
        if self.algorithm == "hierarchical":
            return self.topology.require(group)
        return self.topology.of(group) if self.algorithm == "auto" else None

    def require_peers(self, group: ProcessGroup, device: torch.device) -> None:
        """Make sure that ``peer_read``, if it is asked for, works; a collective call then.

        Raises:
            ValueError: It does not.
        """
        if self.algorithm == "peer_read" and group.size() > 1:
            self.peers.require(group, self.compressor, device)

    def traffic(self, message: Message, *, compressed: bool = True) -> Traffic:
        """Bytes that this rank sends for a message; ``wire`` counts only if it goes compressed."""
        size, algorithm, nodes = message.group.size(), "one_shot", 1
        if compressed and message.collective == "all_reduce":
            groups = self.nodes(message.group)
            nodes = 1 if groups is None else groups.count
            algorithm = choose_algorithm(size, self.algorithm, nodes=nodes)
        return traffic(
            message.collective,
            algorithm,
            message.numel,
            message.itemsize,
            size,
            self.compressor.payload_bytes,
            block=self.compressor.block,
            nodes=nodes,
        )

    def _make_plan(self, message: Message) -> _Plan:
        role, collective, nbytes = message.role, message.collective, message.nbytes
        on = role in self.roles
        small = nbytes < self.min_bytes
        by_policy = self.policy is not None and not self.policy.compresses(role, collective, nbytes)
        compressed = on and not small and not by_policy
        return _Plan(
            counter=self.counter(role, collective),
            nbytes=nbytes,
            on=on,
            small=small,
            by_policy=by_policy,
            traffic=self.traffic(message, compressed=compressed),
            buffers=self._buffers(message) if compressed else 0,
        )

    def _buffers(self, message: Message) -> int:
        size = message.group.size()
        algorithm = "one_shot"
        if message.collective == "all_reduce":
            groups = self.nodes(message.group)
            nodes = 1 if groups is None else groups.count
            algorithm = choose_algorithm(size, self.algorithm, nodes=nodes)
        return buffer_bytes(
            message.collective,
            algorithm,
            message.numel,
            size,
            self.compressor.payload_bytes,
            block=self.compressor.block,
        )

    def _route(
        self,
        role: str,
        collective: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        plain: Plain,
    ) -> Any:
        """Count a call, then send it one way or the other."""
        plan = self._plan(role, collective, output if collective == "all_gather" else input, group)
        count = plan.counter
        count.seen += 1
        count.raw += plan.traffic.raw
        count.largest = max(count.largest, plan.nbytes)
        on = plan.on and self.step >= self.start_step
        if not on or plan.small or plan.by_policy:
            count.wire += plan.traffic.raw
            if on:
                count.small += plan.small
                count.by_policy += plan.by_policy and not plan.small
            return plain()
        count.wire += plan.traffic.wire
        count.compressed += 1
        if self.sampling:
            self.sample(count, input)
        return self._watched_send(
            plan, collective, output, input, group, async_op, self._observer(count)
        )

    def _watched_send(
        self,
        plan: _Plan,
        collective: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        on_payload: OnPayload,
    ) -> Any:
        watcher = self.watcher
        if watcher is None:
            return self.send(collective, output, input, group, async_op, on_payload)
        watcher.called(plan.buffers)
        with watcher.timed():
            handle = self.send(collective, output, input, group, async_op, on_payload)
        return watcher.watched(handle)

    def _plan(self, role: str, collective: str, whole: Tensor, group: ProcessGroup) -> _Plan:
        message = Message(role, collective, whole.numel(), whole.element_size(), group)
        plan = self._plans.get(message)
        if plan is None:
            plan = self._plans[message] = self._make_plan(message)
        return plan

    def parts(
        self, role: str, collective: str, whole: Tensor, group: ProcessGroup
    ) -> SendPart | None:
        """Begin a call that is sent in parts; None, uncounted, where it goes plain.

        It counts once, and whether it is compressed is asked once, both for the whole. Parts of
        whole blocks (of an all-reduce P blocks) have the whole message's bytes between them.

        Args:
            role: its role.
            collective: its name.
            whole: the whole tensor, filled or not.
            group: the process group, of P ranks.
        """
        plan = self._plan(role, collective, whole, group)
        if not plan.on or self.step < self.start_step or plan.small or plan.by_policy:
            return None
        count = plan.counter
        count.seen += 1
        count.compressed += 1
        count.raw += plan.traffic.raw
        count.wire += plan.traffic.wire
        count.largest = max(count.largest, plan.nbytes)

        def send(output: Tensor, input: Tensor) -> Work:
            if self.sampling:
                self.sample(count, input)
            work = self._watched_send(
                plan, collective, output, input, group, True, self._observer(count)
            )
            return cast(Work, work)

        return send

    def _observer(self, count: FlowCounter) -> OnPayload:
        def on_payload(payloads: Tensor, numel: int) -> None:
            count.add_nonfinite(self.compressor.nonfinite_blocks(payloads, numel))

        return on_payload

    @torch.no_grad()
    def sample(self, count: FlowCounter, tensor: Tensor) -> None:
        """Add the codec's error on what this rank sends to a counter."""
        exact = tensor.detach().reshape(-1)
        payload = self.compressor.encode(exact)
        decoded = self.compressor.decode(payload, exact.shape, torch.float32)
        count.add_error(exact.float(), decoded)

    def send(
        self,
        collective: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        on_payload: OnPayload | None,
    ) -> Any:
        """Run a collective compressed, whatever its size, and count nothing.

        Args:
            collective: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
            output: its output; for an all-reduce the tensor itself.
            input: its input; not read for an all-reduce.
            group: the process group.
            async_op: whether to return a handle before it is done.
            on_payload: sees the payloads that this rank encoded.
        """
        if collective == "all_reduce":
            return all_reduce(
                output,
                group=group,
                compressor=self.compressor,
                algorithm=self.algorithm,
                nodes=self.nodes(group),
                peers=self.peers,
                async_op=async_op,
                on_payload=on_payload,
            )
        run = all_gather if collective == "all_gather" else reduce_scatter
        return run(
            output,
            input,
            group=group,
            compressor=self.compressor,
            async_op=async_op,
            on_payload=on_payload,
        )

    def send_checked(
        self, collective: str, output: Tensor, input: Tensor, group: ProcessGroup
    ) -> None:
        """Run a collective as a compressed call does, its check for NaN too; count nothing."""

        def on_payload(payloads: Tensor, numel: int) -> None:
            self.compressor.nonfinite_blocks(payloads, numel)

        self.send(collective, output, input, group, False, on_payload)

    def all_reduce(
        self, role: str, tensor: Tensor, group: ProcessGroup, async_op: bool, plain: Plain
    ) -> Any:
        """Sum ``tensor`` over ``group`` in place; see :func:`collectives.all_reduce`."""
        return self._route(role, "all_reduce", tensor, tensor, group, async_op, plain)

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
        return self._route(role, "reduce_scatter", output, input, group, async_op, plain)

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
        return self._route(role, "all_gather", output, input, group, async_op, plain)
