"""Switches the arms of ``bench step`` while the trainer trains, and times the steps.

A step's time is that from its start to the start of the next: all that a training step costs, the
loop around it included. The device is idle when the clock is read, and the first rank prints a line
a cycle. Nothing in the trainer knows of this: it makes the session, with hooks of its own, and
hears of every step.
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
from megatron_taco.lab import link_check, step_data, step_pipeline
from megatron_taco.lab.link import RankLink
from megatron_taco.lab.step_arms import Arm, ArmConfigs
from megatron_taco.lab.step_data import DataArms
from megatron_taco.lab.step_pipeline import PipelineArms
from megatron_taco.lab.step_router import ArmRouter
from megatron_taco.lab.step_schedule import AUTO, FP32, PLAIN, SILENT, Schedule, Turn
from megatron_taco.lab.step_work import Work, measure_work
from megatron_taco.patching.boundary_gradients import CODEBOOK_SUM, EXCHANGE, PROJECTOR_SUM
from megatron_taco.patching.session import Session
from megatron_taco.telemetry.counters import Counters

_CHECK_BYTES = 16 << 20
_CHECK_BURSTS = 128

Sent = dict[str, list[int]]
"""Flow -> raw bytes, wire bytes, calls, compressed calls; of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What was seen of all steps, the same on all ranks.

    Attributes:
        seconds: Of the slowest rank, one for each step of the schedule.
        sent: Likewise, what was sent on the axes that are measured.
        ranks: How many.
        peak_bytes: Device memory that tensors took at most, of the rank with most; 0 on CPUs, and
            where several models share it.
        checks: The link's, without a link none.
        work: What boundaries themselves cost.
    """

    seconds: list[float]
    sent: list[Sent]
    ranks: int
    peak_bytes: list[int]
    checks: list[link_check.Check]
    work: list[Work]

    def column(self, index: int) -> list[int]:
        """Returns one of the figures of ``sent`` for a rank: the mean, of all flows together.

        The exchange of projectors' gradients, their sums and those of codebooks are left out.
        """
        exact = {str(EXCHANGE), str(PROJECTOR_SUM), str(CODEBOOK_SUM)}
        totals = [
            sum(found[index] for flow, found in sent.items() if flow not in exact)
            for sent in self.sent
        ]
        return [round(total / self.ranks) for total in totals]


class StepDriver:
    """Runs a schedule in one training run.

    Args:
        schedule: The turns. The run has to have one step more, whose start ends the last.
        place: The link that the ranks are on, or None.
        arms: What each arm but ``plain`` does.
        configs: What that is configured as.
    """

    def __init__(
        self, schedule: Schedule, place: RankLink | None, arms: Sequence[Arm], configs: ArmConfigs
    ) -> None:
        self._turns = schedule.by_step()
        self._place = place
        self._arms = {arm.name: arm for arm in (*arms, Arm(name=PLAIN))}
        self._configs = configs
        self._session: Session | None = None
        self._router: ArmRouter | None = None
        self._pipeline: PipelineArms | None = None
        self._data: DataArms | None = None
        self._counters = Counters([])
        self._roles: frozenset[str] = frozenset()
        self._compressors: dict[str, Compressor] = {}
        self._policy: Policy | None = None
        self._checks: list[link_check.Check] = []
        self._started: list[float] = []
        self._counts: list[list[float]] = []
        self._peaks: list[int] = []
        self.steps: Steps | None = None

    def make_session(self, config: Config, **arguments: Any) -> Session:
        """Returns the session of the run, with hooks that take turns.

        Args:
            config: Of the run; its tensor-parallel compressor's settings but for the format are
                those of all arms.
            **arguments: Of :class:`Session`.
        """
        session = Session(config, router_type=ArmRouter, step_listeners=[self._begin], **arguments)
        self._session = session
        if isinstance(session.router, ArmRouter):
            self._router = session.router
            self._roles = session.router.roles
        settings = config.compression.tensor_parallel
        for arm in {arm.tensor for arm in self._arms.values()} - {PLAIN, SILENT, FP32}:
            values = settings.settings() if arm == AUTO else {**settings.settings(), "format": arm}
            self._compressors[arm] = compressors.build(settings.compressor, **values)
        flows = step_pipeline.flows() + step_data.flows(self._configs.data)
        self._counters = Counters(flows)
        if self._configs.pipeline:
            self._pipeline = PipelineArms(self._configs.pipeline, self._counters)
            session.boundaries = self._pipeline
        if self._configs.data:
            self._data = DataArms(self._configs.data, self._counters, arguments["seed"])
            session.data_parallel = self._data
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
        self._switch(self._arms[turn.arm])

    def _switch(self, arm: Arm) -> None:
        if self._pipeline is not None:
            self._pipeline.use(arm.pipeline)
        if self._data is not None:
            self._data.use(arm.data)
        router = self._router
        if router is None:
            return
        router.silent = arm.tensor == SILENT
        router.wide = arm.tensor == FP32
        router.roles = frozenset() if arm.tensor in (PLAIN, FP32) else self._roles
        router.policy = self._policy if arm.tensor == AUTO else None
        if arm.tensor in self._compressors:
            router.compressor = self._compressors[arm.tensor]

    @property
    def _all_counters(self) -> tuple[Counters, ...]:
        if self._session is None:
            raise RuntimeError("a step began before the session was prepared")
        return self._session.counters, self._counters

    def _count(self) -> list[float]:
        """Raw and wire bytes, calls and compressed calls of all flows so far; host numbers."""
        counts = [each[flow] for each in self._all_counters for flow in each.flows]
        return [float(n) for c in counts for n in (c.raw, c.wire, c.seen, c.compressed)]

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
        started = self._started
        seconds = [later - start for start, later in itertools.pairwise(started)]
        largest = torch.tensor(
            [*seconds, *map(float, self._peaks[1:])], dtype=torch.float64, device=_device()
        )
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        numbers = largest.tolist()
        shared = self._pipeline is not None
        peaks = [0 if shared else int(number) for number in numbers[len(seconds) :]]
        return Steps(
            seconds=numbers[: len(seconds)],
            sent=self._gather_sent(),
            ranks=dist.get_world_size(),
            peak_bytes=peaks,
            checks=self._checks,
            work=[] if self._pipeline is None else measure_work(self._pipeline),
        )

    def _gather_sent(self) -> list[Sent]:
        counts = torch.tensor(self._counts, dtype=torch.float64, device=_device())
        dist.all_reduce(counts)
        steps = (counts[1:] - counts[:-1]).view(len(self._turns), -1, 4).long()
        flows = [str(flow) for each in self._all_counters for flow in each.flows]
        return [
            {flow: found for flow, found in zip(flows, row, strict=True) if any(found)}
            for row in steps.tolist()
        ]


def _device() -> torch.device:
    """The device of this rank's tensors, also under the trainer's CPU shim."""
    return torch.device(torch.cuda.current_device())
