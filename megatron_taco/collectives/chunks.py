"""How a message is cut so that encoding, wire and decoding of its chunks overlap.

The cuts follow from sizes and settings alone, so all ranks agree, and lie between blocks, so the
values are those of the whole message, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_LIMIT = 2.5
"""Wire buffers under way at a time, in sizes of the plain tensor, for tensors of _LARGE or more."""
_LARGE = 1 << 20


@dataclass(frozen=True)
class Plan:
    """The cuts of one message.

    Attributes:
        spans: First and last + 1 element of each chunk.
        depth: Chunks under way at a time, which bounds the memory.
    """

    spans: list[tuple[int, int]]
    depth: int


def plan(
    numel: int,
    nbytes: int,
    *,
    unit: int,
    wire_bytes: int,
    chunks: int | None,
) -> Plan:
    """Returns the cuts of a message.

    By default there is one chunk, or as many as keep the memory bounded: what was measured on
    slow links did not pay for more (docs/decisions.md).

    Args:
        numel: Elements that are cut, more than 0.
        nbytes: Bytes of the whole plain tensor.
        unit: Elements between two possible cuts; the last chunk may be ragged.
        wire_bytes: Bytes of the wire buffers, were all chunks under way at once.
        chunks: How many; fewer if there are fewer units. None for the default.
    """
    limit = MEMORY_LIMIT * nbytes
    if chunks is None:
        bounded = nbytes >= _LARGE and wire_bytes > limit
        chunks = 2 * int(-(-wire_bytes // limit)) if bounded else 1
    units = -(-numel // unit)
    count = min(chunks, units)
    edges = [units * i // count * unit for i in range(count)] + [numel]
    depth = count if wire_bytes <= limit else max(1, int(limit * count // wire_bytes))
    return Plan([(edges[i], edges[i + 1]) for i in range(count)], depth)
