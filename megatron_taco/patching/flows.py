"""An enabled role that never happens fails the run, by name (contract 7 of the design)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from megatron_taco.telemetry.console import format_bytes
from megatron_taco.telemetry.counters import Flow, FlowTotal

_STEPS_BEFORE_CHECK = 2


class FlowCheckError(RuntimeError):
    """An enabled role was not seen, or was seen and never compressed."""


def problems(
    totals: Iterable[FlowTotal],
    expected: Sequence[Flow],
    *,
    check_compressed: bool,
    min_bytes: int,
    section: str = "compression.tensor_parallel",
) -> list[str]:
    """What is wrong with the flows seen so far, one sentence each.

    Args:
        totals: counts over all ranks.
        expected: flows that must have happened.
        check_compressed: whether they must have been compressed as well.
        min_bytes: the threshold in force, for the message.
        section: the configuration's section that turned the roles on.
    """
    by_flow = {total.flow: total for total in totals}
    found = []
    for flow in expected:
        total = by_flow.get(flow)
        where = f"{section}: role {flow.role} ({flow.collective})"
        if total is None or not total.seen:
            found.append(
                f"{where} is on but was seen on no rank: the model does not communicate through "
                "the hooked functions (`megatron-taco doctor` lists them), or compression was "
                "installed after the model was built"
            )
        elif check_compressed and not total.compressed:
            found.append(
                f"{where} was seen {total.seen:,} times and never compressed: its largest message "
                f"is {format_bytes(total.largest)} ({total.largest} bytes), below "
                f"min_bytes {format_bytes(min_bytes)} ({min_bytes} bytes); lower "
                f"{section}.min_bytes or turn the role off"
            )
    return found


class StepCheck(Protocol):
    """What is told of each executed step, by every rank alike, and may fail the run."""

    def step_done(self, step: int, *, skipped: bool = False) -> None:
        """Note an executed step, counted from 0; ``skipped`` if it left the weights alone."""

    def finish(self) -> None:
        """Check at the end of the run what a short run has not had the steps to check."""


class FlowCheck:
    """Checks the flows once enough steps have run; every rank calls it alike.

    Args:
        totals: gives the counts over all ranks (a collective call).
        expected: flows that must happen.
        start_step: first step, counted from 0, that is compressed.
        min_bytes: the threshold in force.
        section: the configuration's section that turned the roles on.
        after_updates: whether the flows follow an update of the weights, so that a step which
            Megatron skips (a loss scale too high) does not count.
        plain_passes: whether a flow may be compressed nowhere, as under ``auto``.
    """

    def __init__(
        self,
        *,
        totals: Callable[[], list[FlowTotal]],
        expected: Sequence[Flow],
        start_step: int,
        min_bytes: int,
        plain_passes: bool,
        section: str = "compression.tensor_parallel",
        after_updates: bool = False,
    ) -> None:
        self._section = section
        self._after_updates = after_updates
        self._totals = totals
        self._expected = expected
        self._start_step = start_step
        self._min_bytes = min_bytes
        self._plain_passes = plain_passes
        self._executed = 0
        self._compressing = 0
        self._seen_checked = False
        self._done = False

    def step_done(self, step: int, *, skipped: bool = False) -> None:
        """Note an executed step; raises :class:`FlowCheckError` on a problem.

        Args:
            step: the step, counted from 0.
            skipped: whether it left the weights as they were; the same on all ranks.
        """
        if self._done or (skipped and self._after_updates):
            return
        self._executed += 1
        self._compressing += step >= self._start_step
        if self._compressing >= _STEPS_BEFORE_CHECK:
            self._check(check_compressed=True)
        elif self._executed >= _STEPS_BEFORE_CHECK and not self._seen_checked:
            self._check(check_compressed=False)

    def finish(self) -> None:
        """At the end of the run: check what a short run has not had the steps to check."""
        if self._executed and not self._done:
            self._check(check_compressed=self._compressing > 0)

    def _check(self, *, check_compressed: bool) -> None:
        self._seen_checked = True
        self._done = check_compressed
        found = problems(
            self._totals(),
            self._expected,
            check_compressed=check_compressed and not self._plain_passes,
            min_bytes=self._min_bytes,
            section=self._section,
        )
        if found:
            raise FlowCheckError("\n".join(found))
