"""The boundaries and anchors that one model chunk holds."""

from torch import nn

from megatron_taco.boundaries.anchors import Anchor, build_anchor
from megatron_taco.boundaries.boundary import Boundary
from megatron_taco.boundaries.build import BoundarySettings, build

STATIC = "static"
"""Name of the one table that all segments share."""


class Chain(nn.Module):
    """All of a chunk that holds segments ``first`` .. ``last`` of a model.

    Segment i lies between boundaries i and i + 1 (no boundary 0, none after the last). Boundaries
    within the chunk are in place; the one at its start is a receiver, the one at its end a sender.
    Names in ``state_dict`` do not depend on how the model is cut: ``boundaries.I`` and
    ``anchors.I``. A cut boundary is in two chunks' dictionaries, with equal projector and table.

    Args:
        settings: Of all boundaries.
        count: Boundaries of the whole model, at least 1.
        first: First segment of this chunk, from 0.
        last: Last segment of this chunk, at most ``count``.

    Raises:
        ValueError: If the segments are out of range, or a setting is not allowed.
    """

    def __init__(self, settings: BoundarySettings, count: int, first: int, last: int) -> None:
        super().__init__()
        if not 0 <= first <= last <= count or count < 1:
            raise ValueError(
                f"chain: segments {first} .. {last} of {count + 1}, allowed are 0 .. {count}"
            )
        self.settings, self.count, self.first, self.last = settings, count, first, last
        self.anchors = nn.ModuleDict()
        for segment in range(first, last + 1):
            name = STATIC if settings.anchors == STATIC else str(segment)
            if name not in self.anchors:
                anchor = build_anchor(
                    settings.anchors,
                    settings.vocab,
                    settings.hidden,
                    settings.rank,
                    settings.seed,
                    segment,
                    settings.anchor_std,
                )
                if anchor is not None:
                    self.anchors[name] = anchor
        self.boundaries = nn.ModuleDict()
        for index in range(max(first, 1), min(last + 1, count) + 1):
            ends = "both"
            if index == first:
                ends = "receiver"
            elif index == last + 1:
                ends = "sender"
            self.boundaries[str(index)] = build(
                settings, index, ends, self.anchor(index - 1), self.anchor(index)
            )

    def anchor(self, segment: int) -> Anchor | None:
        """Return a segment's anchors; None if it has none or is not in this chunk."""
        if not self.first <= segment <= self.last:
            return None
        name = STATIC if STATIC in self.anchors else str(segment)
        if name not in self.anchors:
            return None
        found = self.anchors[name]
        assert isinstance(found, Anchor)
        return found

    @property
    def trainable_anchors(self) -> list[Anchor]:
        """The anchors with a table that is trained."""
        anchors = [each for each in self.anchors.values() if isinstance(each, Anchor)]
        return [each for each in anchors if each.trainable]

    def boundary(self, index: int) -> Boundary | None:
        """Return boundary ``index``; None if this chunk has no part in it."""
        name = str(index)
        if name not in self.boundaries:
            return None
        found = self.boundaries[name]
        assert isinstance(found, Boundary)
        return found
