"""Data parallelism in turns: the hooks of each arm, and what sends nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_taco.collectives.work import Work
from megatron_taco.config import Config
from megatron_taco.lab.step_schedule import PLAIN, SILENT
from megatron_taco.lab.step_switch import OWNER, Replacements, Switch, recorded
from megatron_taco.patching.data import DataParallelHooks
from megatron_taco.patching.data_flows import all_flows
from megatron_taco.patching.data_session import data_parallel_hooks
from megatron_taco.patching.overlay import Overlay
from megatron_taco.patching.registry import Hit, Registry
from megatron_taco.telemetry.counters import Counters, Flow

_DDP_INIT = "data.ddp_init"


class DataArms:
    """The data-parallel hooks of all arms; one of them at a time is in force.

    All arms train the same model on the same buckets, so they share a process. Methods with memory
    keep theirs from turn to turn.

    Args:
        configs: Of each arm, ``plain`` among them, whose hooks only count.
        counters: Count for all arms, see :func:`flows`.
        seed: Of the run.

    Attributes:
        local: None: replicas of one model cannot step apart and together in turns.
    """

    local: None = None

    def __init__(self, configs: Mapping[str, Config], counters: Counters, seed: int) -> None:
        self._hooks = {name: _hooks(config, counters, seed) for name, config in configs.items()}
        plain = recorded(self._hooks[PLAIN].claim)
        claims: dict[str, Replacements] = {
            # What an arm does not compress is counted by the plain hooks.
            name: plain | recorded(hooks.claim)
            for name, hooks in self._hooks.items()
        }
        claims[SILENT] = {
            "data.coalescing_manager": _silent_manager,
            "data.reduce_scatter": _silent_call,
            "data.all_gather": _silent_call,
            "data.torch": _silent_torch,
        }
        self._model_wrapped = [
            found.pop(_DDP_INIT) for found in claims.values() if _DDP_INIT in found
        ]
        self._switch = Switch(claims)

    def begin_step(self, step: int, sampling: bool) -> None:
        """Before a training step, counted from 0, of whichever arm."""
        for hooks in self._hooks.values():
            hooks.begin_step(step, sampling)

    def end_step(self, step: int) -> None:
        """Nothing ends with a step."""

    def use(self, arm: str) -> None:
        """Put an arm in force."""
        self._switch.arm = arm

    def claim(self, registry: Registry) -> None:
        """Claim all targets."""
        registry.claim(_DDP_INIT, OWNER, self._ddp_init)
        self._switch.claim(registry)

    def _ddp_init(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        """All arms learn of every model, which is wrapped once."""
        for replacement in self._model_wrapped:
            original = replacement(original, hit)
        return original


def flows(configs: Mapping[str, Config]) -> list[Flow]:
    """Returns all flows that the arms can count.

    Args:
        configs: Of each arm.
    """
    methods = {c.compression.data_parallel.gradients.method: None for c in configs.values()}
    return list(dict.fromkeys(flow for method in methods for flow in all_flows(method)))


def _hooks(config: Config, counters: Counters, seed: int) -> DataParallelHooks:
    hooks = data_parallel_hooks(
        config,
        counters,
        seed,
        distributed_optimizer=config.megatron.get("use_distributed_optimizer") is True,
    )
    if hooks is None:
        raise RuntimeError("an arm of the data axis has compression.data_parallel.mode: off")
    return hooks


def _silent_manager(original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
    @contextlib.contextmanager
    def coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[Work]:
        hit()
        yield Work.done()

    return coalescing_manager


def _silent_call(original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
    """Nothing to do: a rank's output lies in its own part of the bucket."""

    @functools.wraps(original)
    def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Work | None:
        hit()
        return Work.done() if async_op else None

    return collective


def _silent_torch(original: Any, hit: Hit) -> Any:
    distributed = original.distributed
    silent = _silent_call(distributed.all_reduce, hit)
    return Overlay(original, distributed=Overlay(distributed, all_reduce=silent))
