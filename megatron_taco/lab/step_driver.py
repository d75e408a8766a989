"""Switches the arms of ``bench step`` while the trainer trains, and times the steps.

A step's time is that from its start to the start of the next: all that a training step costs, the
loop around it included. The device is idle when the clock is read, and the first rank prints a line
a cycle. Nothing in the trainer knows of this: it makes the session, with a router of its
own, and hears of every step.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_taco import compressors
from megatron_taco.collectives.policy import Policy
from megatron_taco.compressors import Compressor
from megatron_taco.config import Config
from megatron_taco.lab import link_check
from megatron_taco.lab.link import RankLink
from megatron_taco.lab.step_router import ArmRouter
from megatron_taco.lab.step_schedule import AUTO, PLAIN, SILENT, Schedule, Turn
from megatron_taco.patching.session import Session

_CHECK_BYTES = 16 << 20
_CHECK_BURSTS = 128


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What was seen of all steps, the same on all ranks but for bytes, which are this rank's.

    Attributes:
        seconds: Of the slowest rank, one for each step of the schedule.
        raw: Bytes of the tensor-parallel collectives that a plain ring would send, likewise.
        wire: Bytes that were sent.
        calls: Collectives.
        compressed: Of these, compressed ones.
        peak_bytes: Device memory that tensors took at most, of the rank with most; 0 on CPUs.
        checks: The link's, without a link none.
    """

    seconds: list[float]
    raw: list[int]
    wire: list[int]
    calls: list[int]
    compressed: list[int]
    peak_bytes: list[int]
    checks: list[link_check.Check]


class StepDriver:
    """Runs a schedule in one training run.

    Args:
        schedule: The turns. The run has to have one step more, whose start ends the last.
        place: The link that the ranks are on, or None.
    """

    def __init__(self, schedule: Schedule, place: RankLink | None) -> None:
        self._turns = schedule.by_step()
        self._place = place
        self._session: Session | None = None
        self._router: ArmRouter | None = None
        self._roles: frozenset[str] = frozenset()
        self._compressors: dict[str, Compressor] = {}
        self._policy: Policy | None = None
        self._checks: list[link_check.Check] = []
        self._started: list[float] = []
        self._counts: list[tuple[int, int, int, int]] = []
        self._peaks: list[int] = []
        self.steps: Steps | None = None

    def make_session(self, config: Config, **arguments: Any) -> Session:
        """Returns the session of the run, with a router that takes turns.

        Args:
            config: Of the run; its compressor's settings but for the format are those of all arms.
            **arguments: Of :class:`Session`.
        """
        session = Session(config, router_type=ArmRouter, step_listeners=[self._begin], **arguments)
        self._session = session
        if isinstance(session.router, ArmRouter):
            self._router = session.router
            self._roles = session.router.roles
        settings = config.compression.tensor_parallel
        for arm in {turn.arm for turn in self._turns} - {PLAIN, SILENT}:
            values = settings.settings() if arm == AUTO else {**settings.settings(), "format": arm}
            self._compressors[arm] = compressors.build(settings.compressor, **values)
        return session

    def _begin(self, step: int) -> None:
        """Ends the step before and puts the arm of this one in place."""
        if step == 0:
            if self._router is not None:
                self._policy = self._router.policy  # the session has made it just now
            if self._place is not None:
                self._checks = self._check_link(self._place)
        torch.cuda.synchronize()
        self._started.append(time.perf_counter())
        self._counts.append(self._count())
        self._peaks.append(torch.cuda.max_memory_allocated())
        if step == len(self._turns):
            self.steps = self._gather()
            return
        turn = self._turns[step]
        if turn.arm == PLAIN and turn.cycle >= 0 and turn is not self._turns[step - 1]:
            self._say(turn)
        torch.cuda.reset_peak_memory_stats()
        self._switch(turn)

    def _switch(self, turn: Turn) -> None:
        router = self._router
        if router is None:
            return
        router.silent = turn.arm == SILENT
        router.roles = frozenset() if turn.arm == PLAIN else self._roles
        router.policy = self._policy if turn.arm == AUTO else None
        if turn.arm in self._compressors:
            router.compressor = self._compressors[turn.arm]

    def _count(self) -> tuple[int, int, int, int]:
        """Raw and wire bytes, calls and compressed calls of this rank so far; host numbers."""
        if self._session is None:
            raise RuntimeError("a step began before the session was prepared")
        counters = self._session.counters
        counts = [counters[flow] for flow in counters.flows]
        return (
            sum(c.raw for c in counts),
            sum(c.wire for c in counts),
            sum(c.seen for c in counts),
            sum(c.compressed for c in counts),
        )

    def _check_link(self, place: RankLink) -> list[link_check.Check]:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("training began without a process group")
        size = max(_CHECK_BYTES, _CHECK_BURSTS * place.link.burst)
        return link_check.measure(group, _device(), place, [size], repeats=2)

    def _say(self, turn: Turn) -> None:
        if dist.get_rank() == 0:
            last = self._turns[-1].cycle
            done = "warm-up" if turn.cycle == 0 else f"cycle {turn.cycle} of {last}"
            passed = self._started[-1] - self._started[0]
            print(f"bench step: {done} done, {passed:.0f} s", file=sys.stderr, flush=True)

    def _gather(self) -> Steps:
        columns = [_differences([counts[i] for counts in self._counts]) for i in range(4)]
        started = self._started
        seconds = [later - start for start, later in itertools.pairwise(started)]
        largest = torch.tensor(
            [*seconds, *map(float, self._peaks[1:])], dtype=torch.float64, device=_device()
        )
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        numbers = largest.tolist()
        return Steps(
            seconds=numbers[: len(seconds)],
            raw=columns[0],
            wire=columns[1],
            calls=columns[2],
            compressed=columns[3],
            peak_bytes=[int(number) for number in numbers[len(seconds) :]],
            checks=self._checks,
        )


def _device() -> torch.device:
    """The device of this rank's tensors, also under the trainer's CPU shim."""
    return torch.device(torch.cuda.current_device())


def _differences(totals: Sequence[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(totals)]
