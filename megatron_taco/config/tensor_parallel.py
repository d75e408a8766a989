"""Section `compression.tensor_parallel`: TACO on the partial sums of tensor parallelism."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_taco.config.section import Section
from megatron_taco.config.sizes import parse_size

BLOCKS: Final = (32, 64, 128, 256, 512)
"""Elements per block: the sizes that the published TACO kernels have (hpdps-group/COCCL)."""

PUBLISHED_FORMATS: Final = ("e4m3", "e5m2")
"""Formats of the released code, which alone `published_clips` speaks of."""


def _block(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in BLOCKS:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(
            f"{shown} is not a block size; allowed: a power of two from 32 to 512: "
            + ", ".join(map(str, BLOCKS))
        )
    return value


class TensorParallel(Section):
    """How the all-reduces, reduce-scatters and all-gathers of tensor parallelism travel.

    Attributes:
        mode: `on` compresses, `off` leaves Megatron untouched, `auto` measures before the first
            step where compression is faster.
        compressor: The method.
        format: Code of one element.
        block: Elements that share a scale and are rotated together: 32, 64, 128, 256 or 512.
        rotation: Orthonormal Hadamard transform of each block before rounding, or none.
        scales: `dual` sends the two FP32 scales of the paper, `merged_*` their quotient.
        algorithm: Of the all-reduce: `one_shot` has one lossy step, `two_shot` sends less at more
            than two ranks, `hierarchical` sends least between nodes, for groups that span several
            with two ranks or more each.
        forward: Compress activations.
        backward: Compress the gradients of activations.
        embedding: Also compress the input embedding's traffic.
        output_layer: Also compress the output layer's traffic.
        forward_chunks: Parts in which a linear's product is made and sent in the forward pass, so
            that one travels while the next is multiplied; 1 makes it whole.
        min_bytes: Messages smaller than this go plain, in bytes.
        start_step: Iterations that go plain first.
        published_clips: Reproduce the released code's clips (NaN becomes 0); needs dual scales and
            a floating-point format.
    """

    mode: Literal["off", "on", "auto"] = "off"
    compressor: Literal["taco"] = "taco"
    format: Literal["e4m3", "e5m2", "int8", "int6", "int4"] = "e4m3"
    block: Annotated[int, BeforeValidator(_block)] = 256
    rotation: Literal["hadamard", "none"] = "hadamard"
    scales: Literal["dual", "merged_fp32", "merged_bf16"] = "dual"
    algorithm: Literal["auto", "one_shot", "two_shot", "hierarchical"] = "auto"
    forward: bool = True
    backward: bool = True
    embedding: bool = False
    output_layer: bool = False
    forward_chunks: int = Field(default=1, ge=1, le=16)
    min_bytes: Annotated[int, BeforeValidator(parse_size)] = 2**20
    start_step: int = Field(default=0, ge=0)
    published_clips: bool = False

    @property
    def enabled(self) -> bool:
        """Whether anything is to be compressed."""
        return self.mode != "off"

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the compressor."""
        names = ("format", "block", "rotation", "scales", "published_clips")
        return {name: getattr(self, name) for name in names}

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that cannot hold together."""
        if self.published_clips and self.scales != "dual":
            yield (
                "published_clips",
                f"true needs scales: dual, but scales is {self.scales}; "
                "set scales: dual or published_clips: false",
            )
        if self.published_clips and self.format not in PUBLISHED_FORMATS:
            yield (
                "published_clips",
                f"true needs one of the formats {', '.join(PUBLISHED_FORMATS)}, but format is "
                f"{self.format}; set format: e4m3 or published_clips: false",
            )
        if self.enabled and self.forward_chunks > 1 and not (self.forward or self.output_layer):
            yield (
                "forward_chunks",
                f"{self.forward_chunks} sends compressed activations in parts, but forward and "
                "output_layer are false; set forward: true or forward_chunks: 1",
            )
        if self.enabled and not (self.forward or self.backward):
            yield (
                "mode",
                f"{self.mode!r} with forward: false and backward: false compresses nothing; "
                "set one of them to true, or mode: off",
            )
