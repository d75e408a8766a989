"""A step of all boundaries of a process, as one more optimiser in Megatron's chain.

Imported once Megatron is: its base class is Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_taco.boundaries import Boundary, StepReport
from megatron_taco.patching.errors import BoundaryError
from megatron_taco.telemetry.costs import Cost


class BoundaryOptimizer(MegatronOptimizer):
    """Ends each step of the boundaries: projectors move, codebooks learn.

    It has no parameters that Megatron would see, so projectors are in no gradient norm and are not
    clipped: their step does not depend on the gradient's scale. A gradient that is not finite skips
    the step of all optimisers, on all ranks, and all others' skipped steps are skipped here.
    Its state is the model's own (see ``ChunkBoundaries``).

    Args:
        config: Megatron's ``OptimizerConfig``.
        others: the optimisers of the chain so far, at least one.
        boundaries: of this process, by number.
        lr: step length of the projectors, at the peak of the main schedule.
        model_parallel: group of the ranks that hold the parts of one replica of the model.
        stepped: called after each step that was not skipped.
        cost: of the axis.
    """

    def __init__(
        self,
        config: Any,
        others: Sequence[Any],
        boundaries: Mapping[int, Boundary],
        lr: float,
        model_parallel: dist.ProcessGroup,
        stepped: Callable[[], None],
        cost: Cost,
    ) -> None:
        super().__init__(SimpleNamespace(param_groups=[], state={}), config)
        self.is_stub_optimizer = False
        self.reports: dict[int, StepReport] = {}
        self._others, self._boundaries = tuple(others), dict(boundaries)
        self._lr, self._group, self._stepped = lr, model_parallel, stepped
        self._cost = cost
        self._gradients: dict[int, Tensor] = {}
        self._statistics: dict[int, Tensor] = {}
        self._inverse_scale: Tensor | None = None
        self._open = False

    @property
    def others(self) -> tuple[Any, ...]:
        """The optimisers before this one in the chain."""
        return self._others

    @property
    def lr(self) -> float:
        """Step length now: follows the main schedule from warm-up to its end."""
        groups = [group for other in self._others for group in other.param_groups]
        main = next((group for group in groups if group.get("default_config")), groups[0])
        peak = float(main.get("max_lr", self.config.lr))
        return self._lr * float(main["lr"]) / peak if peak else 0.0

    def accept(self, gradients: Mapping[int, Tensor], statistics: Mapping[int, Tensor]) -> None:
        """Take the step's whole gradients, still with the loss scale, and the statistics."""
        self._gradients, self._statistics = dict(gradients), dict(statistics)
        # Now: the scale is changed by the others before this one prepares.
        self._inverse_scale = self.get_loss_scale().reciprocal()
        self._open = True

    def prepare_grads(self) -> bool:
        """Unscale; tell whether a gradient is not finite on any rank of the model."""
        if self._inverse_scale is None or not self._open:
            raise BoundaryError(
                "compression.pipeline_parallel: the optimiser steps before Megatron's "
                "finalize_model_grads has run, which brings the projectors' gradients; set "
                "finalize_model_grads_func of the model's configuration to that function"
            )
        found = torch.zeros(1, device=self._inverse_scale.device)
        for gradient in self._gradients.values():
            gradient *= self._inverse_scale
            found += (~gradient.isfinite()).any()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        bad = bool(found > 0)
        if bad:
            for scaler in _not_yet_backed_off(self._others):
                scaler.update(True)
        return bad

    def step_with_ready_grads(self) -> bool:
        """End the step of every boundary."""
        self._end(skipped=False)
        self._stepped()
        return True

    def skip_if_open(self) -> None:
        """End a step that the chain has skipped."""
        if self._open:
            self._end(skipped=True)

    def _end(self, skipped: bool) -> None:
        lr = self.lr
        self.reports = {}
        with self._cost.timed():
            for number, boundary in sorted(self._boundaries.items()):
                report = boundary.end_step(
                    self._gradients.get(number), lr, self._statistics.get(number), skipped
                )
                if report is not None:
                    self.reports[number] = report
        self._gradients, self._statistics, self._open = {}, {}, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what has accumulated: Megatron does so before it runs a step, or runs it again."""
        self._gradients, self._statistics, self._open = {}, {}, False
        for boundary in self._boundaries.values():
            boundary.begin_step()

    def get_loss_scale(self) -> Tensor:
        """The scale of the chain."""
        scale: Tensor = self._others[0].get_loss_scale()
        return scale

    def get_grad_stats_parallel_group(self) -> dist.ProcessGroup:
        """The group of the chain's first optimiser, so that the chain finds one group."""
        return self._others[0].get_grad_stats_parallel_group()

    def step(self) -> tuple[bool, None, None]:
        """Step alone, without the chain."""
        if self.prepare_grads():
            self.skip_if_open()
            return False, None, None
        return self.step_with_ready_grads(), None, None

    def reload_model_params(self, state_dict: Any = None) -> None:
        """The state is the model's: nothing is copied."""

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """An optimiser without parameters, in the form that Megatron's chains walk through."""
        return {"optimizer": {"state": {}, "param_groups": []}}

    def load_state_dict(self, state_dict: Any) -> None:
        """The model has loaded it."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """As ``state_dict``."""
        return self.state_dict()


def _not_yet_backed_off(optimizers: Sequence[Any]) -> list[Any]:
    """The gradient scalers whose optimisers found nothing wrong in this step, each once.

    Megatron's optimisers have updated their scalers by then: once a step.
    """
    fine: dict[int, Any] = {}
    backed_off: set[int] = set()
    for optimizer in _leaves(optimizers):
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None:
            fine[id(scaler)] = scaler
            if optimizer.found_inf.item() > 0:
                backed_off.add(id(scaler))
    return [scaler for key, scaler in fine.items() if key not in backed_off]


def _leaves(optimizers: Sequence[Any]) -> Iterator[Any]:
    """Optimisers, also those of chains of them."""
    for optimizer in optimizers:
        yield optimizer
        yield from _leaves(getattr(optimizer, "chained_optimizers", ()))


def chained(chain: Any, ours: BoundaryOptimizer) -> None:
    """Put ``ours`` at the end of Megatron's chain of optimisers.

    Raises:
        BoundaryError: it is not a chain.
    """
    if not hasattr(chain, "chained_optimizers"):
        raise BoundaryError(
            f"compression.pipeline_parallel: the optimiser is {type(chain).__name__}, not a chain "
            "that one more can join; use Megatron's DDP and optimisers"
        )
    chain.chained_optimizers.append(ours)
    original = chain.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        ours.skip_if_open()
        return result

    chain.step = step
