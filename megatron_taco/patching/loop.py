"""The training-loop seam: where a step begins and ends, and what is to be reported.

Wraps functions which Megatron's ``train`` looks up as globals at each call.  They run around the
originals and change neither arguments nor results.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_taco.patching.flows import StepCheck
from megatron_taco.patching.registry import Registry
from megatron_taco.telemetry.reporter import Reporter

OWNER = "telemetry"
_LOSS = "lm loss"
_SKIPPED = 1
"""Where in the result of ``train_step`` it says that the step was skipped."""

Hit = Callable[[], None]
StepListener = Callable[[int], None]


class LoopHooks:
    """Claims the loop's functions for a reporter, the session and the flow check.

    Args:
        reporter: gets step times, step figures and evaluation losses.
        begin_step: called with the step, counted from 0, before each training step.
        begin_evaluation: called with the steps done before each evaluation.
        checks: told about each executed step; None where nothing is compressed.
        see_optimizer: called with Megatron's optimiser before ``begin_step``.
        end_step: called with the step after each training step.
    """

    def __init__(
        self,
        reporter: Reporter,
        begin_step: StepListener,
        begin_evaluation: StepListener,
        checks: Sequence[StepCheck | None],
        see_optimizer: Callable[[Any], None] | None = None,
        end_step: StepListener | None = None,
    ) -> None:
        self._reporter = reporter
        self._begin_step = begin_step
        self._begin_evaluation = begin_evaluation
        self._checks = [check for check in checks if check is not None]
        self._see_optimizer = see_optimizer
        self._end_step = end_step
        self._label = "validation"
        self._iteration = 0

    def _train_step(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        from megatron.training import get_args

        signature = inspect.signature(original)

        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            hit()
            step = get_args().curr_iteration
            if self._see_optimizer is not None:
                self._see_optimizer(signature.bind(*args, **kwargs).arguments["optimizer"])
            self._begin_step(step)
            start = time.perf_counter()
            result = original(*args, **kwargs)
            if self._end_step is not None:
                self._end_step(step)
            self._reporter.add_step_time(time.perf_counter() - start)
            for check in self._checks:
                check.step_done(step, skipped=bool(result[_SKIPPED]))
            return result

        return train_step

    def _training_log(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            hit()
            given = signature.bind(*args, **kwargs).arguments
            writers = [get_tensorboard_writer(), get_wandb_writer()]
            self._reporter.step(
                iteration=given["iteration"],
                last_iteration=get_args().train_iters,
                loss=given["loss_dict"].get(_LOSS),
                grad_norm=given["grad_norm"],
                learning_rate=given["learning_rate"],
                loss_scale=given["loss_scale"],
                skipped=bool(given["skipped_iter"]),
                tokens=get_current_global_batch_size() * get_args().seq_length,
                writers=[writer for writer in writers if writer],
            )
            return original(*args, **kwargs)

        return training_log

    def _evaluate(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            hit()
            self._begin_evaluation(self._iteration)
            result = original(*args, **kwargs)
            losses = result[0] or {}
            self._reporter.evaluation(
                label=self._label, iteration=self._iteration, loss=losses.get(_LOSS)
            )
            return result

        return evaluate

    def _evaluate_and_print(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
            hit()
            given = signature.bind(*args, **kwargs).arguments
            self._label = "test" if "test" in str(given["prefix"]) else "validation"
            self._iteration = int(given["iteration"])
            return original(*args, **kwargs)

        return evaluate_and_print_results

    def claim(self, registry: Registry) -> None:
        """Claim the targets; nothing is replaced until the registry is applied."""
        registry.claim("telemetry.train_step", OWNER, self._train_step)
        registry.claim("telemetry.training_log", OWNER, self._training_log)
        registry.claim("telemetry.evaluate", OWNER, self._evaluate)
        registry.claim("telemetry.evaluate_and_print_results", OWNER, self._evaluate_and_print)
