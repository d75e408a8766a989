"""Which arm of ``bench step`` each training step belongs to. Plain data, no torch.

The arms take turns in one run: plain, compressed ones, and silent, in which nothing is sent. Each
turn of another arm lies between two plain ones, which it is compared with, so that what drifts
during the run drifts in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PLAIN: Final = "plain"
AUTO: Final = "auto"
FP32: Final = "fp32"
"""An uncompressed arm whose tensor-parallel messages are FP32: the other baseline in use."""
SILENT: Final = "silent"
_WARM_UP: Final = -1
_WARM_UP_STEPS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Consecutive steps of one arm.

    Attributes:
        arm: ``plain``, ``silent``, or the name of a compressed one.
        cycle: Counted from 0; -1 for the warm-up, of which nothing counts.
        settle: Steps at the start that do not count.
        steps: Steps that count.
    """

    arm: str
    cycle: int
    settle: int
    steps: int

    @property
    def length(self) -> int:
        """All steps of the turn."""
        return self.settle + self.steps


@dataclass(frozen=True)
class Schedule:
    """The turns of a run, in order.

    Attributes:
        turns: Warm-up first; each cycle begins with a plain turn, and one follows the last.
    """

    turns: tuple[Turn, ...]

    @property
    def length(self) -> int:
        """Steps of the whole run."""
        return sum(turn.length for turn in self.turns)

    def by_step(self) -> list[Turn]:
        """Returns the turn of each step."""
        return [turn for turn in self.turns for _ in range(turn.length)]

    def counted(self) -> list[tuple[Turn, range]]:
        """Returns the turns that count, each with the numbers of its steps that count."""
        found, start = [], 0
        for turn in self.turns:
            if turn.steps:
                found.append((turn, range(start + turn.settle, start + turn.length)))
            start += turn.length
        return found


def schedule(others: Sequence[str], *, cycles: int, settle: int, steps: int) -> Schedule:
    """Returns the turns of a run.

    Args:
        others: The arms but ``plain``, in the order of their turns, a compressed one first. Without
            any, nothing but plain steps: another uncompressed configuration is timed so.
        cycles: How often every arm has its turn, at least 1.
        settle: Steps after a change of arm that do not count.
        steps: Steps of a turn that count, at least 1.
    """
    # The first two executed steps have to be compressed ones: the trainer fails a run in which an
    # enabled role was not compressed by then.
    warm_up = [*others, PLAIN]
    turns = [Turn(arm=a, cycle=_WARM_UP, settle=_WARM_UP_STEPS, steps=0) for a in warm_up]
    for cycle in range(cycles):
        for arm in (PLAIN, *others):
            turns.append(Turn(arm=arm, cycle=cycle, settle=settle, steps=steps))
    turns.append(Turn(arm=PLAIN, cycle=cycles, settle=settle, steps=steps))
    return Schedule(tuple(turns))
