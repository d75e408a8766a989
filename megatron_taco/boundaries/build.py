"""From settings to boundaries."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches

from megatron_taco.boundaries.anchors import Anchor, StaticAnchor
from megatron_taco.boundaries.boundary import Boundary, Place
from megatron_taco.boundaries.elementwise import (
    Elementwise,
    Int8Hadamard,
    TacoBoundary,
    TahQuantBoundary,
)
from megatron_taco.boundaries.projected import Fixed, LearnedUnconstrained, Mapl, Projected
from megatron_taco.boundaries.quantizers import BLOCKWISE, Plain, Quantizer, blockwise
from megatron_taco.boundaries.residual_bottleneck import ResidualBottleneck
from megatron_taco.boundaries.rvq import ResidualVQ
from megatron_taco.boundaries.rvq_settings import RvqSettings
from megatron_taco.boundaries.subspace import Subspace

PROJECTED: dict[str, type[Projected]] = {c.kind: c for c in (Mapl, Fixed, LearnedUnconstrained)}
ELEMENTWISE: dict[str, type[Elementwise]] = {
    c.kind: c for c in (TacoBoundary, Int8Hadamard, TahQuantBoundary)
}
KINDS = (*PROJECTED, Subspace.kind, ResidualBottleneck.kind, *ELEMENTWISE)
QUANTIZER_KINDS = ("none", *BLOCKWISE, "rvq")
ROTATIONS = ("hadamard", "none")


@dataclass(frozen=True)
class QuantizerSettings:
    """A quantiser of one direction.

    Attributes:
        kind: none, int8, int4, e4m3 or rvq.
        options: ``block`` and ``rotation`` of the element-wise ones, the fields of ``RvqSettings``.
    """

    kind: str = "none"
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class BoundarySettings:
    """What all boundaries of a model have in common.

    Attributes:
        kind: One of ``KINDS``.
        hidden: Size of the activations d.
        rank: Coordinates on the wire r; 0 (and only 0) for the element-wise kinds.
        vocab: Rows of the anchors' tables, the padded vocabulary.
        anchors: none, static, full or factorised; ``subspace`` has static ones, and
            ``residual_bottleneck`` and the element-wise kinds none.
        anchor_std: Standard deviation of static anchors.
        seed: Of everything random here.
        beta: Momentum of the projector.
        move_every: Of ``subspace``: steps between two moves of it; 0 never.
        move_length: Of ``subspace``: Frobenius norm of a move.
        forward: Quantiser of what crosses; none for the element-wise kinds, which have their own.
        backward: Quantiser of its gradient; likewise.

    Raises:
        ValueError: If the kind is unknown or two fields exclude each other.
    """

    kind: str
    hidden: int
    rank: int = 0
    vocab: int = 0
    anchors: str = "none"
    anchor_std: float = 1.0
    seed: int = 0
    beta: float = 0.95
    move_every: int = 0
    move_length: float = 0.0
    forward: QuantizerSettings = QuantizerSettings()
    backward: QuantizerSettings = QuantizerSettings()

    def __post_init__(self) -> None:
        """Check the combinations; values are checked where they are used."""
        if self.kind not in KINDS:
            raise ValueError(f"boundary is {self.kind!r}{_nearest(self.kind, KINDS)}")
        if self.kind in ELEMENTWISE:
            for name, found in (("rank", self.rank), ("anchors", self.anchors)):
                if found not in (0, "none"):
                    raise ValueError(f"boundary {self.kind!r} has no {name}, found {found!r}")
            for name, each in (("forward", self.forward), ("backward", self.backward)):
                if each.kind != "none":
                    raise ValueError(
                        f"boundary {self.kind!r} has its own quantizer.{name}, found {each.kind!r}"
                    )
        elif not 1 <= self.rank <= self.hidden:
            raise ValueError(f"rank is {self.rank}, allowed is 1 .. {self.hidden} (hidden size)")
        expected = {Subspace.kind: "static", ResidualBottleneck.kind: "none"}.get(self.kind)
        if expected is not None and self.anchors != expected:
            raise ValueError(
                f"boundary {self.kind!r}: anchors is {self.anchors!r}, allowed is {expected}"
            )


def build_quantizer(settings: QuantizerSettings, rank: int, place: Place) -> Quantizer:
    """Return a quantiser for tensors [s, b, rank].

    Raises:
        ValueError: If the kind, an option or its value is not allowed.
    """
    kind, options = settings.kind, dict(settings.options)
    if kind not in QUANTIZER_KINDS:
        raise ValueError(f"quantizer is {kind!r}{_nearest(kind, QUANTIZER_KINDS)}")
    known: tuple[str, ...] = ()
    if kind == "rvq":
        known = tuple(f.name for f in fields(RvqSettings))
    elif kind != "none":
        known = ("block", "rotation")
    for name in options:
        if name not in known:
            raise ValueError(f"quantizer {kind}: there is no {name!r}{_nearest(name, known)}")
    if kind == "none":
        return Plain()
    try:
        if kind == "rvq":
            rvq = RvqSettings(**options)  # type: ignore[arg-type]
            return ResidualVQ(rank, rvq, place.seed, place.index, place.ends)
        return blockwise(kind, rank, **options)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"quantizer {kind}: an option of {options} has a bad type") from None


def build(
    settings: BoundarySettings,
    index: int,
    ends: str = "both",
    before: Anchor | None = None,
    after: Anchor | None = None,
) -> Boundary:
    """Return boundary ``index``, or one half of it.

    Args:
        settings: Of all boundaries.
        index: From 1.
        ends: both, sender or receiver.
        before: Anchors of the segment before it, for the sender.
        after: Anchors of the segment after it, for the receiver.

    Raises:
        ValueError: If a setting has a value that is not allowed.
    """
    place = Place(index, ends, settings.seed)
    hidden, rank = settings.hidden, settings.rank
    if settings.kind in ELEMENTWISE:
        return ELEMENTWISE[settings.kind](place, hidden)  # type: ignore[call-arg]
    there = build_quantizer(settings.forward, rank, place)
    back = build_quantizer(settings.backward, rank, place)
    if settings.kind == ResidualBottleneck.kind:
        return ResidualBottleneck(place, hidden, rank, there, back)
    if settings.kind == Subspace.kind:
        table = before or after
        if not isinstance(table, StaticAnchor):
            raise ValueError(f"boundary {index}: a subspace network needs its static anchors")
        every, length = settings.move_every, settings.move_length
        return Subspace(place, hidden, rank, there, back, table, every, length)
    kind = PROJECTED[settings.kind]
    return kind(place, hidden, rank, there, back, before, after, settings.beta)


def _nearest(name: str, allowed: tuple[str, ...]) -> str:
    near = get_close_matches(name, allowed, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f", allowed are {', '.join(allowed) or 'none'}{hint}"
