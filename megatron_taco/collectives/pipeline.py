"""Runs the chunks of a collective so that their steps overlap.

A chunk is a generator that launches work up to its next message, yields torch's handle of that
message and goes on once it has arrived. All chunks are started first, then taken forward in turn:
encode 0, send 0, encode 1, send 1, ..., wait 0, decode 0, wait 1, decode 1, .... The backend sends
on a stream of its own, so a chunk travels while the next is encoded and the one before decoded,
with all of ours on one stream. No launch waits on the device for one that comes later, so a single
hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) does as well as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from datetime import timedelta
from itertools import islice
from typing import Any

Chunk = Generator[Any, None, None]
"""Yields the handle of each of its messages, or None for one that is done."""


class Pipeline:
    """Chunks under way; all ranks make and finish theirs in the same order."""

    def __init__(self, chunks: Iterable[Chunk], depth: int) -> None:
        """Starts ``depth`` of the chunks; the others start as those end."""
        self._later = iter(chunks)
        self._under_way: deque[tuple[Chunk, Any]] = deque()
        for chunk in islice(self._later, depth):
            self._advance(chunk)

    def _advance(self, chunk: Chunk) -> bool:
        """Goes on to the chunk's next message; tells whether there was one."""
        for handle in chunk:
            self._under_way.append((chunk, handle))
            return True
        return False

    def finish(self, timeout: timedelta | None = None) -> None:
        """Takes all chunks to their end.

        Args:
            timeout: How long to wait for each message; by default the group's timeout.
        """
        while self._under_way:
            if not self._advance(self._arrived(timeout)):
                for later in islice(self._later, 1):
                    self._advance(later)

    def _arrived(self, timeout: timedelta | None) -> Chunk:
        """Waits for the first message under way; returns its chunk.

        The handle ends here: torch's keeps the buffer alive, which a later chunk is to reuse.
        """
        chunk, handle = self._under_way[0]
        if handle is not None:
            if timeout is None:
                handle.wait()
            else:
                handle.wait(timeout)
        self._under_way.popleft()
        return chunk
