"""A router that the benchmark switches between arms.

It can also leave the collectives out, or send FP32 where the tensors are narrower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives.parts import SendPart
from megatron_taco.collectives.router import Plain, Router
from megatron_taco.collectives.work import Work
from megatron_taco.lab.step_wide import send_wide

_FP32_BYTES: Final = 4


@dataclass(kw_only=True)
class ArmRouter(Router):
    """A router whose collectives can be skipped, to time a step without them.

    The results of a skipped collective are finite and of the right shape, and wrong.

    Attributes:
        silent: Send nothing.
        wide: Send FP32, uncompressed.
    """

    silent: bool = False
    wide: bool = False

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
        """Count a call and send it; where messages are wide, in FP32."""
        if not self.wide or input.element_size() >= _FP32_BYTES:
            return super()._route(role, collective, output, input, group, async_op, plain)
        plan = self._plan(role, collective, output if collective == "all_gather" else input, group)
        count = plan.counter
        count.seen += 1
        count.raw += plan.traffic.raw
        count.wire += plan.traffic.raw * _FP32_BYTES // input.element_size()
        return send_wide(collective, output, input, group, async_op)

    def all_reduce(
        self, role: str, tensor: Tensor, group: ProcessGroup, async_op: bool, plain: Plain
    ) -> Any:
        """Sum ``tensor`` over ``group``, or leave this rank's part in it."""
        if not self.silent:
            return super().all_reduce(role, tensor, group, async_op, plain)
        return _nothing(async_op)

    def reduce_scatter(
        self,
        role: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        plain: Plain,
    ) -> Any:
        """Sum ``input`` over ``group``, or copy this rank's slice of it."""
        if not self.silent:
            return super().reduce_scatter(role, output, input, group, async_op, plain)
        output.detach().view(-1).copy_(input.detach().chunk(group.size())[group.rank()].view(-1))
        return _nothing(async_op)

    def all_gather(
        self,
        role: str,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        async_op: bool,
        plain: Plain,
    ) -> Any:
        """Gather ``input`` over ``group``, or repeat it."""
        if not self.silent:
            return super().all_gather(role, output, input, group, async_op, plain)
        output.detach().view(group.size(), -1).copy_(input.detach().reshape(1, -1))
        return _nothing(async_op)

    def parts(
        self, role: str, collective: str, whole: Tensor, group: ProcessGroup
    ) -> SendPart | None:
        """Begin a call that is sent in parts; where nothing is sent there are none."""
        return None if self.silent else super().parts(role, collective, whole, group)


def _nothing(async_op: bool) -> Work | None:
    """Returns what a collective returns that has nothing left to do."""
    return Work.done() if async_op else None
