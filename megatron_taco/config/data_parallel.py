"""Section `compression.data_parallel`: gradients and weights between data-parallel ranks."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_taco.config.gradient_methods import (
    LOCAL_STEPS,
    METHOD_SETTINGS,
    QUANTISED,
    SPARSELOCO,
    method_settings,
)
from megatron_taco.config.section import Section
from megatron_taco.config.sizes import parse_size

KINDS: Final = ("attention", "mlp", "embedding", "output_layer", "other")
"""Kinds of parameters that may be compressed; norms and biases never are."""

SDP4BIT_GRADIENTS: Final = {
    "bits": 4,
    "block": 128,
    "transform": 32,
    "scale": "bf16",
    "rounding": "stochastic",
}
"""SDP4Bit's 4-bit hop (hpdps-group/SDP4Bit): groups of 128 after a Hadamard transform of 32."""
SDP4BIT_INSIDE_NODE: Final = {
    "bits": 8,
    "block": 512,
    "transform": 1,
    "scale": "fp32",
    "rounding": "stochastic",
}
"""SDP4Bit's hop inside a node: 8 bits, groups of 512, not rotated."""
SDP4BIT_WEIGHTS: Final = {"bits": 4, "block": 2048, "transform": 1, "scale": "fp32"}
"""SDP4Bit's weight differences: groups of 2048, not rotated."""

_SETTINGS: Final = {
    "none": (),
    "taco": ("format", "block", "rotation", "scales"),
    "block_integer": ("bits", "block", "transform", "scale", "rounding"),
    "sdp4bit": ("rounding",),
    **METHOD_SETTINGS,
}
_NAMES: Final = frozenset(name for names in _SETTINGS.values() for name in names)


def _kinds(value: object) -> tuple[str, ...]:
    if value is None:
        raise ValueError(f"is empty; allowed: [] or a list of {', '.join(KINDS)}")
    found = value if isinstance(value, list | tuple) else [value]
    for kind in found:
        if kind not in KINDS:
            hint = " (norms and biases always go exactly)" if kind == "norm" else ""
            raise ValueError(
                f"{kind!r} is not a kind of parameters{hint}; allowed: {', '.join(KINDS)}"
            )
    return tuple(found)


class _Codec(Section):
    """A compressor and its settings; those that are not given are the compressor's own defaults."""

    compressor: str
    format: Literal["e4m3", "e5m2", "int8", "int6", "int4"] | None = None
    bits: Literal[8, 6, 4] | None = None
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] | None = None
    rotation: Literal["hadamard", "none"] | None = None
    transform: Literal[1, 32, 64, 128, 256, 512] | None = None
    scales: Literal["dual", "merged_fp32", "merged_bf16"] | None = None
    scale: Literal["fp32", "bf16"] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is compressed."""
        return self.compressor != "none"

    def _given(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in type(self).model_fields if name in _NAMES}
        return {name: value for name, value in found.items() if value is not None}

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that the compressor does not have, or cannot combine."""
        allowed = _SETTINGS[self.compressor]
        for name, value in self._given().items():
            if name not in allowed:
                what = ", ".join(allowed) if allowed else "no settings"
                yield name, f"{value} is not for compressor: {self.compressor}, which has {what}"
        if self.compressor == "taco" and (self.block or 0) > 512:
            yield "block", f"{self.block} is too large for taco; allowed: 32 to 512"
        block, transform = self.block or 128, self.transform or 32
        if self.compressor in ("block_integer", *QUANTISED) and transform > block:
            yield "transform", f"{transform} is larger than block: {block}"


class Gradients(_Codec):
    """How gradients are reduced.

    Attributes:
        compressor: `sdp4bit`, `taco`, `block_integer` or `none`; or a method with memory, which
            takes a bucket whole: `powersgd`, `topk`, `tagc`, `pactrain`, `homomorphic`, `cd_adam`.
            With `sparseloco` replicas take steps of their own and exchange what has changed now
            and then.
        format: Code of `taco`.
        bits: Bits of a code of `block_integer`.
        block: Elements that share a scale.
        rotation: Of `taco`.
        transform: Order of the Hadamard transform of `block_integer`; 1 is none.
        scales: Of `taco`.
        scale: Dtype of the scales of `block_integer`.
        rounding: Of `sdp4bit` (by default stochastic, as published; bits come from a counter) and
            of `block_integer` (by default to nearest).
        two_level: With `sdp4bit` and the distributed optimiser, sum inside each node at 8 bits
            before what goes between nodes at 4, where a group has several ranks on several nodes;
            true by default.
        ranks_per_node: Ranks of a node, if nodes are not to be told by their host names.
        rank: Of `powersgd`'s matrices; 4 by default.
        ratio: Share of the values that `topk` (by default 0.01), `tagc` (0.05) or `sparseloco`
            (0.02) sends.
        selection: How `topk` finds them: `sort`, or `sidco`'s fitted threshold (the default).
        error_feedback: Whether `powersgd` and `topk` keep what they did not send (the default).
        warm_start: Whether `powersgd` starts from the last step's basis (the default).
        packing: How `tagc` and `homomorphic` sum sparse values: `sketch` (the default) or `union`.
        ternary: Whether `pactrain` sends signs and scales.
        local_steps: Steps between two exchanges of `sparseloco`; 15 by default.
        chunk: Values of `sparseloco` of which the largest are sent; 4096 by default.
        residual_decay: What of its residual `sparseloco` keeps from one exchange to the next; 0.95
            by default.
        outer_lr: Step length of `sparseloco`'s outer step; 1 by default.
        memory: `keep` goes on with the memory in the checkpoint, `fresh` starts without.
    """

    compressor: Literal[
        "none",
        "sdp4bit",
        "taco",
        "block_integer",
        "powersgd",
        "topk",
        "tagc",
        "pactrain",
        "homomorphic",
        "cd_adam",
        "sparseloco",
    ] = "sdp4bit"
    two_level: bool | None = None
    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    rank: Annotated[int, Field(ge=1)] | None = None
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    selection: Literal["sort", "sidco"] | None = None
    error_feedback: bool | None = None
    warm_start: bool | None = None
    packing: Literal["sketch", "union"] | None = None
    ternary: bool | None = None
    local_steps: Annotated[int, Field(ge=1)] | None = None
    chunk: Annotated[int, Field(ge=1, le=2**15)] | None = None
    residual_decay: Annotated[float, Field(ge=0, le=1)] | None = None
    outer_lr: Annotated[float, Field(gt=0)] | None = None
    memory: Literal["keep", "fresh"] | None = None

    @property
    def method(self) -> str | None:
        """The method with memory that takes buckets whole, or None for a stateless compressor."""
        return self.compressor if self.compressor in METHOD_SETTINGS else None

    @property
    def rounds(self) -> int | None:
        """Steps between two exchanges of a method whose replicas step apart, else None."""
        if self.compressor != SPARSELOCO:
            return None
        return LOCAL_STEPS if self.local_steps is None else self.local_steps

    def inside_node(self) -> dict[str, Any] | None:
        """Return the settings of the compressor inside a node, or None for one hop."""
        if self.compressor != "sdp4bit" or self.two_level is False:
            return None
        return SDP4BIT_INSIDE_NODE | self._given()

    def build(self) -> tuple[str, dict[str, Any]]:
        """Return the name and the settings of the compressor, or of the method."""
        if self.compressor == "sdp4bit":
            return "block_integer", SDP4BIT_GRADIENTS | self._given()
        if self.method is not None:
            return self.method, method_settings(self.method, self._given())
        return self.compressor, self._given()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go together."""
        yield from super().contradictions()
        for name in ("two_level", "ranks_per_node"):
            if getattr(self, name) is not None and self.compressor != "sdp4bit":
                yield name, f"has no effect with compressor: {self.compressor}; it is for sdp4bit"
        if self.compressor == "sdp4bit" and self.two_level is False and self.ranks_per_node:
            yield "ranks_per_node", "has no effect with two_level: false"
        if self.compressor == "tagc" and self.ratio == 1:
            yield "ratio", "1 is all values, which tagc cannot send; allowed: below 1"


class Weights(_Codec):
    """How weights are gathered; needs the distributed optimiser and BF16 or FP16 weights.

    Attributes:
        compressor: As for gradients.
        difference: Send what changed since all ranks last agreed; without it the weights
            themselves, which loses accuracy and is there for comparison; true by default.
    """

    compressor: Literal["none", "sdp4bit", "taco", "block_integer"] = "none"
    difference: bool | None = None

    def build(self) -> tuple[str, dict[str, Any]]:
        """Return the name and the settings of the compressor."""
        if self.compressor == "sdp4bit":
            return "block_integer", SDP4BIT_WEIGHTS | self._given()
        return self.compressor, self._given()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go together."""
        yield from super().contradictions()
        if self.difference is not None and not self.enabled:
            yield "difference", "has no effect with compressor: none"
        if self.rounding == "stochastic" and self.difference is not False:
            yield (
                "rounding",
                "stochastic with difference: true only adds noise, since what is rounded away is "
                "in the next difference; set rounding: nearest",
            )


class DataParallel(Section):
    """What data-parallel ranks send each other.

    Attributes:
        mode: `on` compresses, `off` leaves Megatron untouched; `auto` measures each class of
            buckets before the first step and compresses where that is faster.
        gradients: How gradients are reduced.
        weights: How weights are gathered.
        exclude: Kinds of parameters that go exactly, in the same messages, or beside a method with
            memory in one of their own; norms and biases always do.
        min_bytes: Buckets smaller than this go plain, in bytes.
        start_step: Iterations that go plain first.
    """

    mode: Literal["off", "on", "auto"] = "off"
    gradients: Gradients = Field(default_factory=Gradients)
    weights: Weights = Field(default_factory=Weights)
    exclude: Annotated[tuple[str, ...], BeforeValidator(_kinds)] = ()
    min_bytes: Annotated[int, BeforeValidator(parse_size)] = 2**20
    start_step: int = Field(default=0, ge=0)

    @property
    def enabled(self) -> bool:
        """Whether anything is to be compressed."""
        return self.mode != "off"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that cannot hold together."""
        if self.enabled and not (self.gradients.enabled or self.weights.enabled):
            yield (
                "mode",
                f"{self.mode!r} with gradients.compressor: none and weights.compressor: none "
                "compresses nothing; choose a compressor for one of them, or mode: off",
            )
        if self.mode == "auto" and self.gradients.method is not None:
            yield (
                "mode",
                f"'auto' with gradients.compressor: {self.gradients.compressor}: auto compares "
                "times, and a method with memory also changes what is learned from a step; "
                "allowed: on",
            )
        if self.enabled and {"attention", "mlp"} <= set(self.exclude):
            yield "exclude", "without attention and mlp there is nothing left worth compressing"
