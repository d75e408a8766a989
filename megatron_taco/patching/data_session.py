"""The data-parallel hooks of a run, from ``compression.data_parallel``."""

from __future__ import annotations

from collections.abc import Callable

from megatron_taco import compressors
from megatron_taco.config import Settings
from megatron_taco.config.data_parallel import Gradients, Weights
from megatron_taco.patching.data import DataParallelHooks
from megatron_taco.patching.data_flows import expected_flows
from megatron_taco.patching.data_methods import maker
from megatron_taco.patching.data_plans import GRADIENTS, WEIGHTS, Stream
from megatron_taco.patching.flows import FlowCheck
from megatron_taco.telemetry.counters import Counters, Flow, FlowTotal


def data_parallel_hooks(
    config: Settings, counters: Counters, seed: int, *, distributed_optimizer: bool
) -> DataParallelHooks | None:
    """Return the hooks of the data-parallel axis, or None if it is off.

    Args:
        config: The run's configuration.
        counters: Of the run, with this axis's flows.
        seed: Of the run; random rounding is keyed by it.
        distributed_optimizer: Whether gradients are reduce-scattered; only then in two hops.
    """
    settings = config.compression.data_parallel
    if not settings.enabled:
        return None

    def stream(role: str, part: Gradients | Weights) -> Stream | None:
        if not part.enabled:
            return None
        name, arguments = part.build()
        method = part.method if isinstance(part, Gradients) else None
        return Stream(
            role=role,
            compressor=None if method else compressors.build(name, **arguments),
            method=method,
            exclude=frozenset(settings.exclude),
            min_bytes=settings.min_bytes,
            start_step=settings.start_step,
            local=isinstance(part, Gradients) and part.rounds is not None,
        )

    name, arguments = settings.gradients.build()
    if settings.gradients.rounds is not None:  # rounds count from there
        arguments |= {"start_step": settings.start_step}
    inside = settings.gradients.inside_node() if distributed_optimizer else None
    by_method = settings.gradients.method is not None
    return DataParallelHooks(
        gradients=stream(GRADIENTS, settings.gradients),
        weights=stream(WEIGHTS, settings.weights),
        difference=settings.weights.difference is not False,
        inside_node=None if inside is None else compressors.build("block_integer", **inside),
        ranks_per_node=settings.gradients.ranks_per_node,
        seed=seed,
        make_method=maker(name, arguments, seed) if by_method else None,
        local_steps=settings.gradients.rounds,
        counter=lambda role, collective: counters[Flow(role, collective)],
    )


def data_parallel_checks(
    hooks: DataParallelHooks,
    config: Settings,
    *,
    totals: Callable[[], list[FlowTotal]],
    distributed_optimizer: bool,
) -> list[FlowCheck]:
    """Return the checks that what is on does happen: of gradients, and of weights once updated.

    Args:
        hooks: Of the run.
        config: The run's configuration.
        totals: Gives the counts over all ranks (a collective call).
        distributed_optimizer: Whether gradients are reduce-scattered.
    """
    settings = config.compression.data_parallel
    return [
        FlowCheck(
            totals=totals,
            expected=expected_flows(stream, distributed_optimizer=distributed_optimizer),
            start_step=settings.start_step,
            min_bytes=settings.min_bytes,
            plain_passes=settings.mode == "auto",
            section="compression.data_parallel",
            after_updates=stream.role == WEIGHTS,
        )
        for stream in (hooks.gradients, hooks.weights)
        if stream is not None
    ]
