"""The policy `auto`: which messages go compressed, decided from what they were measured to take.

A message is compressed where its compressed collective took less than ``1 - MARGIN`` of the time of
the plain one.  Only the time of the communication counts; what of it would have been hidden behind
compute is not looked at, so a message that is wholly hidden may be compressed without need, and
never the reverse.

For what a decision would take to turn, plain and compressed are modelled as ``raw / r`` and
``wire / r + o`` on a link of rate ``r``, with ``raw`` and ``wire`` the bytes that a rank sends.
The two measurements give this link's ``r`` and the overhead ``o`` (the codec, its launches, and
what the compressed exchange wastes of the link); at the break-even rate both take the same time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

Fact = str | int | float | bool | None

MARGIN = 0.03
"""Share of the plain time that compression has to save to be chosen: the run-to-run spread of
medians is of this size, and a message that gains less is better sent exactly."""
RESOLUTION = 0.02
"""Share of the compressed time below which the overhead cannot be told from the spread."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One message of one role, measured plain and compressed.

    Attributes:
        role: Its role.
        collective: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        nbytes: Size of the whole plain tensor in bytes.
        raw: Bytes that a rank sends plain, as ``collectives.traffic`` counts them.
        wire: Bytes that a rank sends compressed.
        plain_s: Median seconds of the plain collective, on the slowest rank.
        compressed_s: The same of the compressed one.
        compress: The decision.
    """

    role: str
    collective: str
    nbytes: int
    raw: int
    wire: int
    plain_s: float
    compressed_s: float
    compress: bool = False

    def decided(self) -> Measured:
        """The same with the decision that the times ask for."""
        return replace(self, compress=self.compressed_s < self.plain_s * (1 - MARGIN))

    @property
    def rate(self) -> float:
        """What the link gave the plain collective, in bytes a second."""
        return self.raw / self.plain_s

    @property
    def overhead_s(self) -> float:
        """Seconds that the compressed collective took beyond sending its bytes at that rate."""
        return self.compressed_s - self.wire / self.rate

    @property
    def overhead_known(self) -> bool:
        """Whether the overhead is large enough to be told from the spread."""
        return self.overhead_s > RESOLUTION * self.compressed_s

    @property
    def break_even(self) -> float:
        """Link rate in bytes a second below which compression wins; 0 if it saves no bytes.

        Where the overhead is not known this is a lower bound.
        """
        overhead = max(self.overhead_s, RESOLUTION * self.compressed_s)
        return max(0.0, (self.raw - self.wire) / overhead)


@dataclass(frozen=True)
class Policy:
    """The decisions of a run, the same on all ranks.

    Attributes:
        measured: What was measured, with its decisions.
        facts: What the measurements hold for: parallel sizes, compressor, messages, device.
    """

    measured: tuple[Measured, ...]
    facts: Mapping[str, Fact]

    @cached_property
    def _classes(self) -> dict[tuple[str | None, str], list[Measured]]:
        """What was measured by (role, collective), and by (None, collective) for all roles."""
        classes: dict[tuple[str | None, str], list[Measured]] = {}
        for item in self.measured:
            for role in (item.role, None):
                classes.setdefault((role, item.collective), []).append(item)
        return classes

    def compresses(self, role: str, collective: str, nbytes: int) -> bool:
        """Tell whether a message goes compressed.

        Evaluation may send other sizes than training. A size that was not measured is decided as
        the nearest measured one of its role and collective, by the logarithm of the bytes; a role
        of which this collective was not measured as the nearest of any role. A collective of which
        nothing was measured goes plain. All of this depends on arguments that are the same on all
        ranks of a group.

        Args:
            role: The message's role.
            collective: Its collective.
            nbytes: Size of the whole plain tensor in bytes, at least 1.
        """
        known = self._classes.get((role, collective)) or self._classes.get((None, collective))
        if not known:
            return False
        wanted = math.log2(max(nbytes, 1))
        nearest = min(known, key=lambda item: abs(math.log2(item.nbytes) - wanted))
        return nearest.compress

    @property
    def all_plain(self) -> bool:
        """Whether nothing is compressed."""
        return not any(item.compress for item in self.measured)

    def differences(self, facts: Mapping[str, Fact]) -> list[str]:
        """Return, for each fact that is another one now, ``KEY was X, is Y``."""
        return [
            f"{key} was {_shown(self.facts, key)}, is {_shown(facts, key)}"
            for key in sorted(self.facts.keys() | facts.keys())
            if self.facts.get(key) != facts.get(key)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as nested dicts, lists and scalars, for JSON and for checkpoints."""
        return {
            "margin": MARGIN,
            "facts": dict(self.facts),
            "measured": [asdict(item) for item in self.measured],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Policy:
        """Return the policy of a :meth:`to_dict`.

        Raises:
            ValueError: The record is not one of this version.
        """
        try:
            measured = tuple(Measured(**item) for item in record["measured"])
            return cls(measured, dict(record["facts"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a policy of this version: {error}") from error

    def save(self, path: Path) -> None:
        """Write the policy as JSON; a reader finds all of it or the file that was there before.

        Raises:
            OSError: The file cannot be written.
        """
        draft = path.with_name(path.name + ".new")
        draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)


def _shown(facts: Mapping[str, Fact], key: str) -> str:
    return str(facts[key]) if key in facts else "not recorded"
