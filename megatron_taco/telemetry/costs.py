"""What compression itself costs a rank, by parallel axis: memory, and time of the host.

Time is that of the host in calls that go compressed, Megatron's own share of the wrapped calls
included: on a CPU encoding, messages and decoding; on a GPU what it takes to launch them. Of the
pipeline's boundaries it is that of encoding, decoding and learning; a projector's backward pass is
part of the model's. Buffers are those of the messages of the largest call, as their layout has it,
or the changes of weights that wait for their gather; they go back to the allocator after that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from megatron_taco.telemetry.console import format_bytes


def _nothing() -> int:
    return 0


@dataclass
class Cost:
    """The costs of one axis on one rank.

    Attributes:
        axis: Its section of the configuration.
        state: Gives the bytes that are kept from step to step.
        buffers: Bytes of the messages of the largest call.
        host_s: Seconds of the host so far.
        calls: Compressed calls so far.
    """

    axis: str
    state: Callable[[], int] = _nothing
    buffers: int = 0
    host_s: float = 0.0
    calls: int = 0
    _depth: int = field(default=0, repr=False)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time spent inside; a call within a call counts once."""
        start = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.host_s += time.perf_counter() - start

    def called(self, buffers: int) -> None:
        """Note a compressed call whose messages take so many bytes."""
        self.calls += 1
        self.buffers = max(self.buffers, buffers)

    def watched(self, handle: Any) -> Any:
        """Return a handle of the same collective whose ``wait`` is counted; None stays None."""
        return None if handle is None else _Watched(handle, self)

    def numbers(self) -> list[float]:
        """All figures, for a maximum over ranks."""
        return [float(self.state()), float(self.buffers), self.host_s, float(self.calls)]


class _Watched:
    """A handle whose ``wait`` is timed; all else is the handle's own."""

    def __init__(self, handle: Any, cost: Cost) -> None:
        self._handle = handle
        self._cost = cost

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the collective."""
        with self._cost.timed():
            return self._handle.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def records(axes: Sequence[str], numbers: Sequence[float], steps: int) -> dict[str, dict[str, Any]]:
    """Return the figures by axis, with the time of a step; axes without a call are left out.

    Args:
        axes: In the order of the numbers.
        numbers: ``Cost.numbers`` of each axis, the largest of all ranks.
        steps: Training steps that the time is of.
    """
    width = len(numbers) // max(1, len(axes))
    found = {}
    for index, axis in enumerate(axes):
        state, buffers, host_s, calls = numbers[index * width : (index + 1) * width]
        if calls:
            found[axis] = {
                "state_bytes": int(state),
                "buffer_bytes": int(buffers),
                "host_ms_per_step": host_s * 1e3 / max(1, steps),
            }
    return found


def cost_table(costs: dict[str, dict[str, Any]]) -> Table:
    """The table printed at the end: a row an axis."""
    table = Table(title="What compression costs (the rank with most)", title_justify="left")
    table.add_column("axis", no_wrap=True)
    for column in ("memory kept", "message buffers", "host ms a step"):
        table.add_column(column, justify="right")
    for axis, cost in costs.items():
        table.add_row(
            axis,
            format_bytes(cost["state_bytes"]),
            format_bytes(cost["buffer_bytes"]),
            f"{cost['host_ms_per_step']:.1f}",
        )
    return table
