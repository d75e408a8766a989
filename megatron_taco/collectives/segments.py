"""Where the parts of a flat bucket lie: which go exactly, which encoded, and where in a message.

A data-parallel bucket holds many parameters in a row. Each belongs to a *kind* (attention, norm,
...), so a bucket is a sequence of runs of one kind. In a message all runs of a kind that lie in one
slice of the bucket are put together and encoded at once: a block never straddles two kinds, and
kinds that are to stay exact travel in the same message as the others, in the bucket's dtype.

Message of a slice: for each kind in order of first appearance, its bytes, padded to 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which the parts of a message are aligned, so that they can be read as any dtype."""


@dataclass(frozen=True)
class Run:
    """Elements ``start`` to ``stop`` of a bucket, all of one kind."""

    start: int
    stop: int
    kind: str


@dataclass(frozen=True)
class Part:
    """All elements of one kind in one slice of a bucket.

    Attributes:
        kind: The kind.
        exact: Whether they are sent as they are.
        spans: (start, stop) in the bucket, ascending.
        numel: Elements.
        offset: Where the part begins in the slice's message, in bytes.
        used: Bytes of its codes and scales, or of its values if exact.
    """

    kind: str
    exact: bool
    spans: tuple[tuple[int, int], ...]
    numel: int
    offset: int
    used: int

    @property
    def size(self) -> int:
        """Bytes in the message, padding included."""
        return aligned(self.used)

    def take(self, flat: Tensor) -> Tensor:
        """Returns the part's elements of ``flat`` [N] in a row: [numel]; may be a view."""
        pieces = [flat[start:stop] for start, stop in self.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def put(self, values: Tensor, flat: Tensor) -> None:
        """Writes ``values`` [numel] to the part's places in ``flat`` [N], cast to its dtype."""
        at = 0
        for start, stop in self.spans:
            flat[start:stop].copy_(values[at : at + stop - start])
            at += stop - start

    def shifted(self, start: int) -> Part:
        """Returns the part with its places counted from ``start`` of the bucket."""
        spans = tuple((first - start, last - start) for first, last in self.spans)
        return replace(self, spans=spans)

    def bytes_of(self, message: Tensor) -> Tensor:
        """Returns this part of messages, uint8 [..., bytes] to [..., used]; a view."""
        return message[..., self.offset : self.offset + self.used]


@dataclass(frozen=True)
class Slice:
    """A slice of a bucket, and how its message is laid out.

    Attributes:
        start: First element in the bucket.
        stop: One past the last.
        parts: One for each kind in it.
        size: Bytes of the message.
    """

    start: int
    stop: int
    parts: tuple[Part, ...]
    size: int


def aligned(size: int) -> int:
    """Returns ``size`` rounded up to the alignment of parts."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def runs_of(places: Iterable[tuple[int, int, str]], numel: int) -> tuple[Run, ...]:
    """Returns the runs of a bucket of ``numel`` elements: all of it, ascending.

    Args:
        places: (start, stop, kind) of each parameter in the bucket, in any order.
        numel: Elements of the bucket, padding included. Padding counts with what precedes it.

    Raises:
        ValueError: Parameters overlap, or one lies outside the bucket.
    """
    runs: list[Run] = []
    for start, stop, kind in sorted(places):
        before = runs[-1].stop if runs else 0
        if start < before or stop > numel:
            raise ValueError(
                f"a parameter at {start}:{stop} overlaps one that ends at {before}, or lies "
                f"outside its bucket of {numel} elements"
            )
        first = 0 if not runs else before
        if runs and start > before:
            runs[-1] = Run(runs[-1].start, start, runs[-1].kind)
            first = start
        if runs and runs[-1].kind == kind:
            runs[-1] = Run(runs[-1].start, stop, kind)
        else:
            runs.append(Run(first, stop, kind))
    if runs and runs[-1].stop < numel:
        runs[-1] = Run(runs[-1].start, numel, runs[-1].kind)
    return tuple(runs)


def slice_of(
    runs: Iterable[Run],
    start: int,
    stop: int,
    *,
    exact: Callable[[str], bool],
    itemsize: int,
    payload_bytes: Callable[[int], int],
) -> Slice:
    """Lays out the message of elements ``start`` to ``stop`` of a bucket.

    Args:
        runs: Of the bucket.
        start: First element.
        stop: One past the last; a slice may be empty.
        exact: Whether a kind goes exactly.
        itemsize: Bytes of an element of the bucket.
        payload_bytes: Of the compressor.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            spans.setdefault(run.kind, []).append((first, last))
    parts, offset = [], 0
    for kind, found in spans.items():
        numel = sum(last - first for first, last in found)
        used = numel * itemsize if exact(kind) else payload_bytes(numel)
        parts.append(Part(kind, exact(kind), tuple(found), numel, offset, used))
        offset += parts[-1].size
    return Slice(start, stop, tuple(parts), offset)
