"""Losses of whole runs side by side: what scripts/reproduce/one_gpu_training.py found, as tables.

A report has an entry for each layout, and in it one for each run: ``uncompressed`` and the formats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

UNCOMPRESSED: Final = "uncompressed"
_MIB: Final = 2**20


def run_record(lines: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Returns what a report keeps of one run.

    Args:
        lines: The records of its ``metrics.jsonl``, every step logged.
        seconds: Its wall time, start-up included.
    """
    steps = [line for line in lines if line["event"] == "step"]
    validation = [line["loss"] for line in lines if line["event"] == "validation"]
    end = [line["flows"] for line in lines if line["event"] == "end"]
    return {
        "seconds": seconds,
        "loss": [step["loss"] for step in steps],
        "validation_loss": validation[-1],
        "step_ms": [step["step_ms"] for step in steps],
        "flows": end[-1] if end else {},
    }


def number(loss: float | None) -> float:
    """Returns a loss of a report, in which NaN and Inf are null."""
    return math.nan if loss is None else loss


def tail(losses: Sequence[float | None]) -> float:
    """Returns the mean loss of the last tenth of the steps, of ten at least."""
    return statistics.mean(map(number, losses[-tail_length(losses) :]))


def tail_length(losses: Sequence[float | None]) -> int:
    """Returns how many steps :func:`tail` is the mean of."""
    return max(10, len(losses) // 10)


def table(
    runs: Mapping[str, Mapping[str, Any]], *, times: bool
) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of a layout's table.

    Args:
        runs: By name, the uncompressed one among them.
        times: Whether the times of the steps mean something: the runs went one after the other.
    """
    off = runs[UNCOMPRESSED]
    head = ["", *runs]
    length = tail_length(off["loss"])
    rows = [[f"loss, mean of the last {length} steps", *_cells(runs, _tail_of, "{:.4f}")]]
    rows.append(["validation loss", *_cells(runs, _validation, "{:.4f}")])
    if times:
        rows.append(["ms a step, median", *_cells(runs, _median_ms, "{:.0f}")])
        tenths = [statistics.quantiles(run["step_ms"][5:], n=10) for run in runs.values()]
        cells = [f"{found[0]:.0f}, {found[-1]:.0f}" for found in tenths]
        rows.append(["ms a step, 10th and 90th percentile", *cells])
    finite = ["no" if None in run["loss"] else "yes" for run in runs.values()]
    rows.append(["every loss finite", *finite])
    return head, rows


def flow_table(run: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of what a compressed run sent, by role and collective."""
    head = ["role", "calls", "compressed", "raw MiB", "wire MiB", "wire/raw", "error", "non-finite"]
    rows = []
    for flow, f in run["flows"].items():
        raw, wire = f["raw_bytes"] / _MIB, f["wire_bytes"] / _MIB
        error = "-" if f["error"] is None else f"{f['error']:.2%}"
        sizes = [f"{raw:.0f}", f"{wire:.0f}", f"{wire / raw:.3f}"]
        counts = [str(f["calls"]), str(f["compressed"])]
        rows.append([flow, *counts, *sizes, error, str(f["nonfinite_blocks"])])
    return head, rows


def _tail_of(run: Mapping[str, Any]) -> float:
    return tail(run["loss"])


def _validation(run: Mapping[str, Any]) -> float:
    return number(run["validation_loss"])


def _median_ms(run: Mapping[str, Any]) -> float:
    return statistics.median(run["step_ms"][5:])


def _cells(
    runs: Mapping[str, Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float], form: str
) -> list[str]:
    """The value of each run, and for all but the uncompressed one its relative difference."""
    off = value(runs[UNCOMPRESSED])
    cells = []
    for name, run in runs.items():
        found = value(run)
        change = "" if name == UNCOMPRESSED else f" ({found / off - 1:+.2%})"
        cells.append(form.format(found) + change)
    return cells
