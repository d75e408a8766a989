"""The pipeline axis of a session: its hooks and what it has to see."""

from __future__ import annotations

from collections.abc import Callable

from megatron_taco.config import Settings
from megatron_taco.patching import pipeline
from megatron_taco.patching.flows import FlowCheck
from megatron_taco.telemetry.counters import Counters, Flow, FlowTotal


def pipeline_flows(config: Settings) -> list[Flow]:
    """Every flow that the axis can count; none where it is off."""
    return pipeline.all_flows() if config.compression.pipeline_parallel.enabled else []


def pipeline_hooks(config: Settings, counters: Counters) -> pipeline.PipelineHooks | None:
    """The hooks of the axis, or None where it is off."""
    settings = config.compression.pipeline_parallel
    return pipeline.PipelineHooks(settings, counters) if settings.enabled else None


def pipeline_checks(
    config: Settings, *, totals: Callable[[], list[FlowTotal]], stages: int
) -> list[FlowCheck]:
    """What fails the run when nothing is sent as a message; nothing where the axis is off.

    Args:
        config: the run's configuration.
        totals: gives the counts over all ranks (a collective call).
        stages: pipeline-parallel size.
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
        )
    ]
