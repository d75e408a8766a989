"""The pipeline axis of a session: its hooks and what it has to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_taco.config import Settings
from megatron_taco.patching import pipeline
from megatron_taco.patching.boundary_passes import PassCheck
from megatron_taco.patching.flows import FlowCheck, StepCheck
from megatron_taco.telemetry.counters import Counters, Flow, FlowTotal


def pipeline_flows(config: Settings) -> list[Flow]:
    """Every flow that the axis can count; none where it is off."""
    return pipeline.all_flows() if config.compression.pipeline_parallel.enabled else []


def pipeline_hooks(config: Settings, counters: Counters) -> pipeline.PipelineHooks | None:
    """The hooks of the axis, or None where it is off."""
    settings = config.compression.pipeline_parallel
    return pipeline.PipelineHooks(settings, counters) if settings.enabled else None


def pipeline_checks(
    config: Settings,
    *,
    totals: Callable[[], list[FlowTotal]],
    stages: int,
    never_passed: Callable[[], Sequence[int]],
) -> list[StepCheck]:
    """What fails the run when nothing is sent, or a boundary never passed; empty where it is off.

    Args:
        config: the run's configuration.
        totals: gives the counts over all ranks (a collective call).
        stages: pipeline-parallel size.
        never_passed: gives the depths without a training pass (a collective call).
    """
    settings = config.compression.pipeline_parallel
    if not settings.enabled:
        return []
    return [
        FlowCheck(
            totals=totals,
            expected=pipeline.expected_flows(settings, stages),
            start_step=0,
            min_bytes=0,
            # Whatever is seen is a message of a boundary; the projectors' exchange is exact.
            plain_passes=True,
            section=pipeline.OWNER,
        ),
        PassCheck(never_passed),
    ]
