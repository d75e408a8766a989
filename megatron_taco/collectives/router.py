"""Sends each collective of a known role compressed or plain, and counts it.

The one place where a call meets the run's settings: whether its role is on, whether it is large
enough, and whether ``start_step`` has come.  The answer depends on settings, sizes and the step
alone, so all ranks of a group give the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.all_gather import all_gather
from megatron_taco.collectives.all_reduce import OnPayload, all_reduce, choose_algorithm
from megatron_taco.collectives.parts import Parts
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


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(kw_only=True)
class Router:
    """Routes the collectives of one parallel axis.

    Attributes:
        compressor: encodes every compressed message.
        algorithm: ``auto``, ``one_shot`` or ``two_shot``, for all-reduce.
        roles: the roles that are on; all others go plain.
        min_bytes: messages below this size in bytes go plain.
        start_step: first step, counted from 0, that is compressed.
        step: the step that runs now; the training loop sets it.
        sampling: whether errors are sampled in this step.
        counter: gives the counter of a role's collective.
    """

    compressor: Compressor
    algorithm: str
    roles: frozenset[str]
    min_bytes: int
    start_step: int
    counter: Callable[[str, str], FlowCounter]
    step: int = 0
    sampling: bool = False

    def compresses(self, role: str, collective: str, tensor: Tensor) -> bool:
        """Tell whether a call with the whole ``tensor`` would go compressed; count nothing."""
        return self._may_compress(role) and _size(tensor) >= self.min_bytes

    def _may_compress(self, role: str) -> bool:
        return role in self.roles and self.step >= self.start_step

    def _plan(self, role: str, collective: str, tensor: Tensor) -> tuple[FlowCounter, bool]:
        """Count the call; tell whether it goes compressed."""
        count = self.counter(role, collective)
        count.seen += 1
        count.largest = max(count.largest, _size(tensor))
        compresses = self.compresses(role, collective, tensor)
        if compresses:
            count.compressed += 1
        elif self._may_compress(role):
            count.small += 1
        return count, compresses

    def _account(
        self,
        count: FlowCounter,
        collective: str,
        tensor: Tensor,
        group: ProcessGroup,
        compressed: bool,
    ) -> None:
        world = group.size()
        sent = traffic(
            collective,
            choose_algorithm(world, self.algorithm),
            tensor.numel(),
            tensor.element_size(),
            world,
            self.compressor.payload_bytes,
            block=self.compressor.block,
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
        return self._compressed(count, sent, compressed)

    def _compressed(
        self,
        count: FlowCounter,
        sent: Tensor,
        compressed: Callable[[OnPayload], Any],
    ) -> Any:
        self._sample(count, sent)
        return compressed(self._observer(count))

    def parts(self, role: str, collective: str, whole: Tensor, group: ProcessGroup) -> Parts:
        """Count a call that is compressed and will be sent in parts.

        Args:
            role: its role.
            collective: its name; ``compresses`` has said yes.
            whole: the whole tensor, filled or not.
            group: the process group.
        """
        count, _ = self._plan(role, collective, whole)

        def send(part: Tensor, sent: Tensor, call: Callable[[OnPayload], Any]) -> Any:
            self._account(count, collective, part, group, compressed=True)
            return self._compressed(count, sent, call)

        return Parts(compressor=self.compressor, algorithm=self.algorithm, group=group, send=send)

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
