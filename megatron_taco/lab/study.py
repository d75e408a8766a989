"""Arms that train the same tokens with several seeds: what differs from what, and what may not.

Arms of one seed start from the same weights and see the same tokens, so that losses are compared
pair by pair. What the seeds leave open, they say: a difference below twice their spread is called
unresolved.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_taco.lab.loss_report import number
from megatron_taco.lab.markdown import markdown_table

Runs = Mapping[str, Mapping[int, float]]
"""The loss that each arm ended with, by seed."""

RESOLVED: Final = 2.0
"""Times the spread of the seeds from which a difference means something."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one arm ends above another.

    Attributes:
        mean: Of the seeds that both have, in nats.
        share: Of the other's mean loss.
        spread: Largest minus least of the seeds, or the median of all arms' if that is more; None
            where no arm has two seeds.
        seeds: How many both have.
    """

    mean: float
    share: float
    spread: float | None
    seeds: int

    @property
    def resolved(self) -> bool:
        """Whether it is at least ``RESOLVED`` times the spread, which takes two seeds."""
        return self.spread is not None and abs(self.mean) >= RESOLVED * self.spread

    def __str__(self) -> str:
        """Return nats, percent and, where it has to be said, how little that means."""
        text = f"{self.mean:+.4f} ({self.share:+.2%})"
        if self.spread is None:
            return f"{text}, one seed"
        return text if self.resolved else f"{text}, unresolved"


def difference(runs: Runs, arm: str, other: str) -> Difference | None:
    """Return how far ``arm`` ends above ``other``; None if no seed has both.

    Args:
        runs: Of all arms: those with two seeds tell the spread.
        arm: An arm.
        other: What it is compared with.
    """
    found = _pairs(runs, arm, other)
    if not found:
        return None
    spreads = [_spread(_pairs(runs, each, other)) for each in runs if each != other]
    known = [spread for spread in spreads if spread is not None]
    spread = statistics.median(known) if known else None
    if spread is not None:
        spread = max(spread, _spread(found) or 0.0)
    base = statistics.mean(runs[other][seed] for seed in runs[arm] if seed in runs[other])
    mean = statistics.mean(found)
    return Difference(mean=mean, share=mean / base, spread=spread, seeds=len(found))


def _pairs(runs: Runs, arm: str, other: str) -> list[float]:
    ours, theirs = runs.get(arm, {}), runs.get(other, {})
    return [ours[seed] - theirs[seed] for seed in sorted(ours) if seed in theirs]


def _spread(found: Sequence[float]) -> float | None:
    return max(found) - min(found) if len(found) > 1 else None


def run_record(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a study keeps of one run, which may have been resumed.

    Args:
        lines: The records of its ``metrics.jsonl``; of a step that was run twice the later one
            counts.
    """
    steps: dict[int, Mapping[str, Any]] = {}
    validation: dict[int, float | None] = {}
    projectors: dict[str, Any] = {}
    for line in lines:
        if line["event"] == "step":
            steps[line["iteration"]] = line
        elif line["event"] == "validation":
            validation[line["iteration"]] = line["loss"]
        elif line["event"] == "projectors":
            projectors = line["angles"]
    ordered = [steps[step] for step in sorted(steps)]
    moving = [line["boundaries"] for line in ordered if line.get("boundaries")]
    return {
        "steps": sorted(steps),
        "loss": [line["loss"] for line in ordered],
        "validation": sorted(validation.items()),
        "step_ms": statistics.median([line["step_ms"] for line in ordered] or [0.0]),
        "orthonormality": max(
            (each["orthonormality"] for row in moving for each in row.values()), default=None
        ),
        "repairs": sum(each["repairs"] for each in moving[-1].values()) if moving else 0,
        "angles": projectors,
    }


def ended(records: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, dict[int, float]]:
    """Return the last validation loss of each run, by arm and seed."""
    return {
        arm: {seed: number(run["validation"][-1][1]) for seed, run in runs.items()}
        for arm, runs in records.items()
    }


def table(
    records: Mapping[str, Mapping[int, Mapping[str, Any]]],
    columns: Mapping[str, Mapping[str, str]],
    against: Sequence[str],
) -> list[str]:
    """Return the table of a study in Markdown, an arm a row, in the order of the records.

    Args:
        records: Of each arm and seed: what ``run_record`` returned.
        columns: Further columns: head, and a cell for each arm.
        against: Arms to compare all others with.
    """
    runs = ended(records)
    head = ["arm", *columns, "seeds", "validation loss", *(f"against {arm}" for arm in against)]
    rows = []
    for arm, losses in runs.items():
        row = [arm, *(cells.get(arm, "") for cells in columns.values()), str(len(losses))]
        row.append(f"{statistics.mean(losses.values()):.4f}")
        for other in against:
            found = None if arm == other else difference(runs, arm, other)
            row.append("" if found is None else str(found))
        rows.append(row)
    return markdown_table(head, rows)


def curves(records: Mapping[str, Mapping[int, Mapping[str, Any]]], base: str) -> dict[str, Any]:
    """Return what is drawn of each arm: the mean losses of its seeds.

    Args:
        records: As for ``table``.
        base: The arm that training losses are shown against, of the seeds that both have.
    """
    arms: dict[str, Any] = {}
    for arm, runs in records.items():
        shown = list(runs.values())
        losses = [run["loss"] for seed, run in runs.items() if seed in records.get(base, {})]
        validation = zip(*(run["validation"] for run in shown), strict=True)
        arms[arm] = {
            "loss": [statistics.mean(map(number, step)) for step in zip(*losses, strict=True)],
            "validation": [
                (pairs[0][0], statistics.mean(number(loss) for _, loss in pairs))
                for pairs in validation
            ],
        }
    return arms
