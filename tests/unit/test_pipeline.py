"""The order of chunks, and that nothing of a finished chunk is kept."""

import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from megatron_taco.collectives.pipeline import Chunk, Pipeline


class Handle:
    """A message, which may fail to arrive."""

    def __init__(self, name: str, log: list[str], fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.fails:
            raise RuntimeError(f"{self.name} did not arrive")
        self.log.append(f"wait {self.name}" + (f" {timeout.seconds} s" if timeout else ""))


def _chunk(index: int, messages: int, log: list[str]) -> Chunk:
    for message in range(messages):
        log.append(f"{index}.{message}")
        yield Handle(f"{index}.{message}", log)
    log.append(f"{index} done")


def test_order() -> None:
    """All start, then go forward in turn."""
    log: list[str] = []
    pipeline = Pipeline((_chunk(i, 2, log) for i in range(2)), depth=2)
    assert log == ["0.0", "1.0"]
    pipeline.finish()
    assert log[2:] == [
        "wait 0.0",
        "0.1",
        "wait 1.0",
        "1.1",
        "wait 0.1",
        "0 done",
        "wait 1.1",
        "1 done",
    ]


def test_depth() -> None:
    """A chunk starts when one before it has ended; messages that are done are not waited for."""
    log: list[str] = []
    pipeline = Pipeline((_chunk(i, 1, log) for i in range(3)), depth=1)
    pipeline.finish(timedelta(seconds=5))
    assert log == [
        *("0.0", "wait 0.0 5 s", "0 done"),
        *("1.0", "wait 1.0 5 s", "1 done"),
        *("2.0", "wait 2.0 5 s", "2 done"),
    ]

    def instant() -> Chunk:
        yield None
        log.append("instant")

    Pipeline([instant()], depth=1).finish()
    assert log[-1] == "instant"


def test_nothing_of_a_finished_chunk_is_kept() -> None:
    """Its handle and buffers are gone before the next chunk takes memory."""
    alive: list[weakref.ref[Any]] = []

    def chunk() -> Chunk:
        assert all(found() is None for found in alive)
        buffer = Handle("buffer", [])
        handle = Handle("message", [])
        alive.extend([weakref.ref(buffer), weakref.ref(handle)])
        yield handle
        del handle
        buffer.wait()

    def chunks() -> Iterator[Chunk]:
        for _ in range(3):
            yield chunk()

    Pipeline(chunks(), depth=1).finish()
    assert len(alive) == 6


def test_a_message_that_does_not_arrive() -> None:
    """Its error passes, and the chunk is still under way: finish may be tried again."""
    log: list[str] = []
    handle = Handle("late", log, fails=True)

    def chunk() -> Chunk:
        yield handle
        log.append("done")

    pipeline = Pipeline([chunk()], depth=1)
    with pytest.raises(RuntimeError, match="late did not arrive"):
        pipeline.finish()
    handle.fails = False
    pipeline.finish()
    assert log == ["wait late", "done"]
