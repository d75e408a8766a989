"""Starts the chunks of a collective, and finishes them unless the caller will."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from megatron_taco.collectives.pipeline import Chunk, Pipeline
from megatron_taco.collectives.work import Work

OnPayload = Callable[[Tensor, int], None]
"""Called once for each chunk, with the payloads that this rank encoded, ``uint8 [R, b]``, and the
elements of a row. They may be read on the current stream until it returns."""


def run(
    chunks: Iterator[Chunk], depth: int, done: Callable[[], None], tensor: Tensor, async_op: bool
) -> Work | None:
    """Runs a collective.

    Args:
        chunks: Its chunks, in order.
        depth: How many are under way at a time.
        done: Called after the last of them.
        tensor: A tensor of the collective.
        async_op: Whether to return once the first messages are under way.

    Returns:
        The handle if ``async_op``, else None.
    """
    pipeline = Pipeline(chunks, depth)
    if async_op:
        return Work(pipeline, done, tensor)
    pipeline.finish()
    done()
    return None


def nothing() -> None:
    """The ``done`` of a collective that has nothing left to do."""
