"""Section `compression.pipeline_parallel.quantizer`: codes of what crosses a boundary."""

from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import Field

from megatron_taco.config.section import Section

_ELEMENTWISE: Final = ("block", "rotation")
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


class GradientQuantizer(Section):
    """A code of each value; options that are not set keep the method's own defaults.

    Attributes:
        kind: `int8`, `int4` and `e4m3` code each value; codebooks (rvq) are for activations alone.
        block: Values that share a scale; if not given the largest up to 256 that divides the rank.
        rotation: Over a block; `hadamard` if not given.
    """

    kind: Literal["none", "int8", "int4", "e4m3"] = "none"
    block: Literal[32, 64, 128, 256, 512] | None = None
    rotation: Literal["hadamard", "none"] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that are set."""
        return _set(self)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield options that the kind does not have."""
        return _foreign(self, () if self.kind == "none" else _ELEMENTWISE)


class Quantizer(Section):
    """The code of the activations; options that are not set keep the method's own defaults.

    Attributes:
        kind: `int8`, `int4` and `e4m3` code each value, `rvq` learns codebooks.
        block: Of the element-wise kinds: values that share a scale; if not given the largest up to
            256 that divides the rank.
        rotation: Of the element-wise kinds, over a block; `hadamard` if not given.
        width: Of rvq: coordinates of a group, a divisor of the rank; 4 if not given.
        rounds: Of rvq: residual rounds; 4 if not given.
        codes: Of rvq: code vectors of a round and group; 256 if not given.
        parts: Of rvq: parts in which a codebook is streamed, 0 or a divisor of codes; 0, which is
            as many as codes, if not given.
        decay: Of rvq: of the running statistics, a step; 0.99 if not given.
        dead: Of rvq: a code used less than this times the mean is put elsewhere; 0.01 if not given.
        candidates: Of rvq: dead codes put elsewhere in a step, at most; 32 if not given.
        warmup_steps: Of rvq: steps before quantisation; 100 if not given.
        sample: Of rvq: tokens that the first codebook is made from, as many as codes or more; 8192
            if not given.
        iterations: Of rvq: of k-means; 10 if not given.
    """

    kind: Literal["none", "int8", "int4", "e4m3", "rvq"] = "none"
    block: Literal[32, 64, 128, 256, 512] | None = None
    rotation: Literal["hadamard", "none"] | None = None
    width: int | None = Field(default=None, ge=1)
    rounds: int | None = Field(default=None, ge=1)
    codes: int | None = Field(default=None, ge=2, le=256)
    parts: int | None = Field(default=None, ge=0, le=256)
    decay: float | None = Field(default=None, ge=0, lt=1)
    dead: float | None = Field(default=None, ge=0, lt=1)
    candidates: int | None = Field(default=None, ge=1)
    warmup_steps: int | None = Field(default=None, ge=1)
    sample: int | None = Field(default=None, ge=1)
    iterations: int | None = Field(default=None, ge=1)

    def options(self) -> dict[str, Any]:
        """Return the options that are set."""
        return _set(self)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield options that the kind does not have."""
        allowed = {"none": (), "rvq": _RVQ}.get(self.kind, _ELEMENTWISE)
        return _foreign(self, allowed)


class Quantizers(Section):
    """Of what crosses, and of its gradient.

    Attributes:
        forward: Of the activations.
        backward: Of their gradients.
    """

    forward: Quantizer = Field(default_factory=Quantizer)
    backward: GradientQuantizer = Field(default_factory=GradientQuantizer)


def _set(section: Section) -> dict[str, Any]:
    names = (name for name in type(section).model_fields if name != "kind")
    return {name: getattr(section, name) for name in names if getattr(section, name) is not None}


def _foreign(
    section: Quantizer | GradientQuantizer, allowed: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for name in section.options():
        if name not in allowed:
            yield (
                name,
                f"not an option of kind: {section.kind}; allowed: {', '.join(allowed) or 'none'}",
            )
