"""Which boundaries a model chunk has: from depths and Megatron's distribution of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megatron_taco.patching.errors import BoundaryError

_KEY = "compression.pipeline_parallel.after_layers"


@dataclass(frozen=True)
class Span:
    """The part of a model that one chunk holds.

    Attributes:
        depths: after which layers, counted from 1, the boundaries of the whole model sit.
        first: first segment of the chunk; segment i lies between boundaries i and i + 1.
        last: its last segment.
    """

    depths: tuple[int, ...]
    first: int
    last: int

    @property
    def inside(self) -> dict[int, int]:
        """Boundaries within the chunk: number of the boundary, from 1, by depth."""
        numbers = range(self.first + 1, self.last + 1)
        return {self.depths[number - 1]: number for number in numbers}

    @property
    def at_start(self) -> int | None:
        """Number of the boundary where the chunk begins; None at the model's beginning."""
        return self.first or None

    @property
    def at_end(self) -> int | None:
        """Number of the boundary where the chunk ends; None at the model's end."""
        return self.last + 1 if self.last < len(self.depths) else None


def stage_cuts(config: Any) -> tuple[int, ...]:
    """Depths at which Megatron cuts the layers of the whole model into chunks.

    Args:
        config: Megatron's ``TransformerConfig``.

    Raises:
        BoundaryError: a chunk has no layer.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size
    places = [(chunk, stage) for chunk in range(chunks or 1) for stage in range(stages)]
    layout = config.pipeline_model_parallel_layout
    if layout is not None and stages > 1:
        # Megatron's function would give the offset of this process's own stage for all.
        counts = [layout.layout[stage][chunk].count(LayerType.decoder) for chunk, stage in places]
        starts = [0, *accumulate(counts)]
    else:
        starts = [
            get_transformer_layer_offset(config, chunk if chunks else None, stage)
            for chunk, stage in places
        ]
        starts.append(config.num_layers)
    if any(start >= end for start, end in pairwise(starts)):
        raise BoundaryError(
            f"{_KEY}: a pipeline stage has no layers (stages begin after layers {starts[:-1]} of "
            f"{config.num_layers}), so a boundary would lie in two places; give each stage a layer"
        )
    return tuple(starts[1:-1])


def resolve_depths(
    after_layers: Sequence[int] | None, cuts: Sequence[int], layers: int
) -> tuple[int, ...]:
    """The depths of the boundaries, checked against the stages.

    Args:
        after_layers: as configured; None for the cuts themselves.
        cuts: where stages are cut.
        layers: of the whole model.

    Raises:
        BoundaryError: there is none, one is outside the model, or a cut has none.
    """
    depths = tuple(cuts if after_layers is None else after_layers)
    if not depths:
        raise BoundaryError(
            f"{_KEY}: not given, and with one pipeline stage there is no cut to put a boundary at; "
            "name the depths, or set compression.pipeline_parallel.mode: off"
        )
    outside = [depth for depth in depths if not 1 <= depth < layers]
    if outside:
        raise BoundaryError(f"{_KEY}: {outside} of {list(depths)}: allowed are 1 .. {layers - 1}")
    missing = sorted(set(cuts) - set(depths))
    if missing:
        raise BoundaryError(
            f"{_KEY}: the stages are cut after layers {list(cuts)}, and {missing} are not among "
            f"the boundaries' depths {list(depths)}; add them, or choose stages that are cut "
            "at these depths"
        )
    return depths


def span(depths: tuple[int, ...], start: int, end: int) -> Span:
    """The segments of a chunk of layers ``start`` + 1 .. ``end``.

    Args:
        depths: of all boundaries; each end of the chunk is among them or an end of the model.
        start: layers before the chunk.
        end: layers before the next chunk.
    """
    first = sum(depth <= start for depth in depths)
    return Span(depths, first, first + sum(start < depth < end for depth in depths))
