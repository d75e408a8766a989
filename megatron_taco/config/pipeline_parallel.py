"""Section `compression.pipeline_parallel`: what crosses between pipeline stages, and where."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_taco.config.messages import shown
from megatron_taco.config.quantizers import Quantizers
from megatron_taco.config.section import Section

PROJECTED: Final = ("mapl", "fixed", "learned_unconstrained")
"""Boundaries with a projector, which may have anchors."""

ELEMENTWISE: Final = ("taco", "int8_hadamard", "tah_quant")
"""Boundaries that code the activation itself: no rank, anchors or quantisers of their own."""

RANK: Final = 256
"""Rank of the published runs (MAPL, arXiv 2606.05484, at every model size)."""

LEARNED: Final = ("mapl", "learned_unconstrained")
"""Boundaries with a projector that is trained."""

SUBSPACE: Final = "subspace"
"""The boundary of a Subspace Network, whose one subspace all boundaries share."""

LR: Final = 2e-3
"""A tenth of Muon's rate in the published runs (MAPL)."""

BETA: Final = 0.95
MOVE_EVERY: Final = 500
"""About what Protocol Models has (arXiv 2506.01260)."""

MOVE_LENGTH: Final = 0.1
"""Radians over all directions; a published value was not found."""

SEED: Final = 1234
CHECK_EVERY: Final = 100


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


class PipelineParallel(Section):
    """The boundaries between the layers of a model: part of it whatever the pipeline size.

    Attributes:
        mode: `off` leaves Megatron untouched.
        boundary: The method. `mapl` learns an orthonormal projector; `fixed` keeps the random one;
            `learned_unconstrained` has no manifold; `subspace` keeps the model's weights in one
            subspace (Subspace Networks); `residual_bottleneck` is a small trained encoder and
            decoder; `taco`, `int8_hadamard` and `tah_quant` code the activation itself.
        after_layers: Depths at which a boundary sits, in layers; the stage cuts if not given. Each
            cut must be among them.
        rank: Coordinates of a token that cross; 256 if not given, where there is a rank.
        lr: Step length of a learned projector; follows the shape of the main schedule. 0.002 if
            not given.
        beta: Momentum of a learned projector; 0.95 if not given.
        move_every: Of `subspace`: steps between two moves of it, 0 for none; 500 if not given.
        move_length: Of `subspace`: Frobenius norm of a move, in radians; 0.1 if not given.
        anchors: Table of a vector for each token; `factorised` if not given, where there may be
            anchors. `full` and `factorised` begin as the embedding and have no weight decay.
        quantizer: Of what crosses, beside the projection.
        seed: Of projectors, anchors and codebooks; 1234 if not given.
        check_every: Steps between two comparisons of what both ends of a boundary hold, 0 for
            none; 100 if not given.
    """

    mode: Literal["off", "on"] = "off"
    boundary: Literal[
        "mapl",
        "fixed",
        "learned_unconstrained",
        "subspace",
        "residual_bottleneck",
        "taco",
        "int8_hadamard",
        "tah_quant",
    ] = "mapl"
    after_layers: Annotated[tuple[int, ...], BeforeValidator(_depths)] | None = None
    rank: int | None = Field(default=None, ge=1)
    lr: float | None = Field(default=None, ge=0.0, le=0.25)
    beta: float | None = Field(default=None, ge=0.0, lt=1.0)
    move_every: int | None = Field(default=None, ge=0)
    move_length: float | None = Field(default=None, ge=0.0, le=0.25)
    anchors: Literal["none", "static", "full", "factorised"] | None = None
    quantizer: Quantizers = Field(default_factory=Quantizers)
    seed: int | None = Field(default=None, ge=0)
    check_every: int | None = Field(default=None, ge=0)

    @property
    def enabled(self) -> bool:
        """Whether there are boundaries."""
        return self.mode != "off"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield settings that the kind of boundary does not have."""
        kind = f"boundary: {self.boundary}"
        for name, effect in self._effects().items():
            found = getattr(self, name)
            if found is not None and effect:
                yield name, f"{shown(found)} has no effect: {kind} {effect}; remove the key"
        if self.boundary in ELEMENTWISE:
            for name in ("forward", "backward"):
                code = getattr(self.quantizer, name).kind
                if code != "none":
                    yield (
                        f"quantizer.{name}.kind",
                        f"{kind} has a code of its own, found {code!r}; allowed: none",
                    )
        anchors = self._allowed_anchors()
        if self.anchors is not None and self.anchors not in anchors:
            if anchors == ("none",):
                message = f"{shown(self.anchors)}: {kind} has no anchors; allowed: none"
            else:
                message = f"{shown(self.anchors)}: {kind} has the table that its weights are "
                message += f"constrained with; allowed: {', '.join(anchors)}"
            yield "anchors", message

    def _effects(self) -> dict[str, str]:
        """Return why a key would do nothing with this kind of boundary, or an empty text."""
        elementwise = self.boundary in ELEMENTWISE
        still = "" if self.boundary in LEARNED else "has no projector that learns"
        alone = self.boundary == "residual_bottleneck" and self.quantizer.forward.kind != "rvq"
        moves = "" if self.boundary == SUBSPACE else "has no subspace that moves"
        return {
            "rank": "has no rank" if elementwise else "",
            "lr": still,
            "beta": still,
            "move_every": moves,
            "move_length": moves,
            "seed": "draws nothing at random" if elementwise else "",
            "check_every": "keeps nothing at both ends" if elementwise or alone else "",
        }

    def _allowed_anchors(self) -> tuple[str, ...]:
        if self.boundary == SUBSPACE:
            return ("static",)
        return ("none", "static", "full", "factorised") if self.boundary in PROJECTED else ("none",)

    def resolved_rank(self) -> int:
        """Return the rank, 0 for a boundary that has none."""
        if self.boundary in ELEMENTWISE:
            return 0
        return RANK if self.rank is None else self.rank

    def resolved_lr(self) -> float:
        """Return the step length of a learned projector."""
        return LR if self.lr is None else self.lr

    def resolved_beta(self) -> float:
        """Return the momentum of a learned projector."""
        return BETA if self.beta is None else self.beta

    def resolved_move_every(self) -> int:
        """Return the steps between two moves of a subspace; 0 for boundaries that have none."""
        if self.boundary != SUBSPACE:
            return 0
        return MOVE_EVERY if self.move_every is None else self.move_every

    def resolved_move_length(self) -> float:
        """Return the length of a move."""
        return MOVE_LENGTH if self.move_length is None else self.move_length

    def resolved_anchors(self) -> str:
        """Return the kind of anchors."""
        if self.anchors is not None:
            return self.anchors
        if self.boundary == SUBSPACE:
            return "static"
        return "factorised" if self.boundary in PROJECTED else "none"

    def resolved_seed(self) -> int:
        """Return the seed of all that is random here."""
        return SEED if self.seed is None else self.seed

    def resolved_check_every(self) -> int:
        """Return the steps between two comparisons, 0 for none."""
        return CHECK_EVERY if self.check_every is None else self.check_every
