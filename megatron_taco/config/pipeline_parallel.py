"""Section `compression.pipeline_parallel`: what crosses between pipeline stages, and where."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_taco.config.section import Section

PROJECTED: Final = ("mapl", "fixed", "learned_unconstrained")
"""Boundaries with a projector, which may have anchors."""

ELEMENTWISE: Final = ("taco", "int8_hadamard", "tah_quant")
"""Boundaries that code the activation itself: no rank, anchors or quantisers of their own."""

RANK: Final = 256
"""Rank of the published runs (MAPL, arXiv 2606.05484, at every model size)."""

_RVQ: Final = (
    "width",
    "rounds",
    "codes",
    "parts",
    "decay",
    "dead",
    "candidates",
    "warmup_steps",
    "sample",
    "iterations",
)
_OPTIONS: Final = {
    "none": (),
    "int8": ("block", "rotation"),
    "int4": ("block", "rotation"),
    "e4m3": ("block", "rotation"),
    "rvq": _RVQ,
}


def _depths(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and value:
        depths = tuple(value)
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in depths)
        if whole and depths[0] >= 1 and all(a < b for a, b in pairwise(depths)):
            return depths
    raise ValueError(
        f"{value!r} is not a list of depths; allowed: numbers of layers from 1, ascending, "
        "for example [6, 12, 18]"
    )


class Quantizer(Section):
    """The quantiser of one direction; options that are not set keep the method's own defaults.

    Attributes:
        kind: `int8`, `int4` and `e4m3` code each value, `rvq` learns codebooks.
        block: Of the element-wise kinds: values that share a scale.
        rotation: Of the element-wise kinds: over a block.
        width: Of rvq: coordinates of a group.
        rounds: Of rvq: residual rounds.
        codes: Of rvq: code vectors of a round and group.
        parts: Of rvq: parts in which a codebook is streamed; 0 means as many as codes.
        decay: Of rvq: of the running statistics, a step.
        dead: Of rvq: a code used less than this times the mean is put elsewhere.
        candidates: Of rvq: dead codes put elsewhere in a step, at most.
        warmup_steps: Of rvq: steps before quantisation.
        sample: Of rvq: tokens that the first codebook is made from.
        iterations: Of rvq: of k-means.
    """

    kind: Literal["none", "int8", "int4", "e4m3", "rvq"] = "none"
    block: Literal[32, 64, 128, 256, 512] | None = None
    rotation: Literal["hadamard", "none"] | None = None
    width: int | None = Field(default=None, ge=1)
    rounds: int | None = Field(default=None, ge=1)
    codes: int | None = Field(default=None, ge=2, le=256)
    parts: int | None = Field(default=None, ge=0, le=256)
    decay: float | None = Field(default=None, ge=0, lt=1)
    dead: float | None = Field(default=None, ge=0)
    candidates: int | None = Field(default=None, ge=1)
    warmup_steps: int | None = Field(default=None, ge=1)
    sample: int | None = Field(default=None, ge=1)
    iterations: int | None = Field(default=None, ge=1)

    def options(self) -> dict[str, Any]:
        """Return the options that are set."""
        names = (name for name in type(self).model_fields if name != "kind")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield options that the kind does not have."""
        allowed = _OPTIONS[self.kind]
        for name in self.options():
            if name not in allowed:
                yield (
                    name,
                    f"not an option of kind: {self.kind}; allowed: {', '.join(allowed) or 'none'}",
                )


class Quantizers(Section):
    """Of what crosses, and of its gradient.

    Attributes:
        forward: Of the activations.
        backward: Of their gradients; rvq is for activations alone.
    """

    forward: Quantizer = Field(default_factory=Quantizer)
    backward: Quantizer = Field(default_factory=Quantizer)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield what a gradient cannot have."""
        if self.backward.kind == "rvq":
            yield (
                "backward.kind",
                "rvq is for activations alone; allowed: none, int8, int4, e4m3",
            )


class PipelineParallel(Section):
    """The boundaries between the layers of a model: part of it whatever the pipeline size.

    Attributes:
        mode: `off` leaves Megatron untouched.
        boundary: The method. `mapl` learns an orthonormal projector; `fixed` keeps the random one;
            `learned_unconstrained` has no manifold; `residual_bottleneck` is a linear bottleneck;
            `taco`, `int8_hadamard` and `tah_quant` code the activation itself.
        after_layers: Depths at which a boundary sits, in layers; the stage cuts if not given. Each
            cut must be among them.
        rank: Coordinates of a token that cross; 256 if not given, where there is a rank.
        lr: Step length of a learned projector; follows the shape of the main schedule.
        beta: Momentum of a learned projector.
        anchors: Table of a vector for each token; `factorised` if not given, where there may be
            anchors.
        quantizer: Of what crosses, beside the projection.
        seed: Of projectors, anchors and codebooks.
        check_every: Steps between two comparisons of what both ends of a boundary hold; 0 never.
    """

    mode: Literal["off", "on"] = "off"
    boundary: Literal[
        "mapl",
        "fixed",
        "learned_unconstrained",
        "residual_bottleneck",
        "taco",
        "int8_hadamard",
        "tah_quant",
    ] = "mapl"
    after_layers: Annotated[tuple[int, ...], BeforeValidator(_depths)] | None = None
    rank: int | None = Field(default=None, ge=1)
    lr: float = Field(default=2e-3, ge=0.0, le=0.25)
    beta: float = Field(default=0.95, ge=0.0, lt=1.0)
    anchors: Literal["none", "static", "full", "factorised"] | None = None
    quantizer: Quantizers = Field(default_factory=Quantizers)
    seed: int = Field(default=1234, ge=0)
    check_every: int = Field(default=100, ge=0)

    @property
    def enabled(self) -> bool:
        """Whether there are boundaries."""
        return self.mode != "off"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that the kind of boundary does not have."""
        if self.boundary in ELEMENTWISE:
            if self.rank is not None:
                yield "rank", f"boundary: {self.boundary} has no rank; remove the key"
            for name in ("forward", "backward"):
                kind = getattr(self.quantizer, name).kind
                if kind != "none":
                    yield (
                        f"quantizer.{name}.kind",
                        f"boundary: {self.boundary} has a code of its own, found {kind!r}; "
                        "allowed: none",
                    )
        if self.boundary not in PROJECTED and self.anchors not in (None, "none"):
            yield "anchors", f"boundary: {self.boundary} has no anchors; allowed: none"

    def resolved_rank(self) -> int:
        """Return the rank, 0 for a boundary that has none."""
        if self.boundary in ELEMENTWISE:
            return 0
        return RANK if self.rank is None else self.rank

    def resolved_anchors(self) -> str:
        """Return the kind of anchors."""
        if self.anchors is not None:
            return self.anchors
        return "factorised" if self.boundary in PROJECTED else "none"
