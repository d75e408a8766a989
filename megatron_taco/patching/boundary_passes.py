"""A boundary that no training pass goes through fails the run, by its depth.

Messages between stages are counted as they are sent; a boundary in place sends nothing, and would
be absent without a word where layers are run by other code than their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_taco.patching.flows import FlowCheckError

_STEPS_BEFORE_CHECK = 2


class PassCheck:
    """Checks the passes once enough steps have run; every rank calls it alike.

    Args:
        never_passed: depths of the boundaries without a training pass on any rank (a collective
            call).
    """

    def __init__(self, never_passed: Callable[[], Sequence[int]]) -> None:
        self._never_passed = never_passed
        self._executed = 0
        self._done = False

    def step_done(self, step: int, *, skipped: bool = False) -> None:
        """Note an executed step; raises :class:`FlowCheckError` on a problem.

        Args:
            step: the step, counted from 0.
            skipped: whether it left the weights as they were; its passes count.
        """
        self._executed += 1
        if self._executed >= _STEPS_BEFORE_CHECK:
            self.finish()

    def finish(self) -> None:
        """At the end of the run: check what a short run has not had the steps to check."""
        if not self._executed or self._done:
            return
        self._done = True
        missing = list(self._never_passed())
        if missing:
            raise FlowCheckError(
                f"compression.pipeline_parallel: the boundaries after layers {missing} are on and "
                "no training step passed them on any rank: the layers do not run through their own "
                "forward, or the boundaries were taken out of the model"
            )
