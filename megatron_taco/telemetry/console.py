"""The console: one line a step, and the table at the end."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table

from megatron_taco.telemetry.counters import FlowTotal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(size: float) -> str:
    """A size in bytes with a binary unit and three significant digits."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"


def format_count(number: float) -> str:
    """A rate with a decimal suffix: 4.83k."""
    for suffix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number:.3g}"


def step_line(
    *,
    iteration: int,
    last_iteration: int,
    loss: float | None,
    grad_norm: float | None,
    learning_rate: float | None,
    step_ms: float,
    tokens_per_s: float,
    ratios: Sequence[tuple[str, float]],
    skipped: bool,
) -> str:
    """The line printed for one logged step."""
    width = len(str(last_iteration))
    parts = [f"step {iteration:>{width}}/{last_iteration}"]
    parts.append("skipped" if skipped else f"loss {loss:.4f}" if loss is not None else "loss -")
    if grad_norm is not None:
        parts.append(f"grad norm {grad_norm:.3f}")
    if learning_rate is not None:
        parts.append(f"lr {learning_rate:.2e}")
    parts.append(f"{step_ms:.0f} ms")
    parts.append(f"{format_count(tokens_per_s)} tok/s")
    if ratios:
        parts.append("wire/raw " + " ".join(f"{name} {ratio:.3f}" for name, ratio in ratios))
    left = datetime.timedelta(seconds=round((last_iteration - iteration) * step_ms / 1e3))
    parts.append(f"left {left}")
    return " | ".join(parts)


def flow_table(totals: Sequence[FlowTotal], title: str) -> Table:
    """The end table: a row for each flow that happened and one for their sum."""
    table = Table(title=title, title_justify="left")
    table.add_column("role", no_wrap=True, min_width=15)
    table.add_column("collective", no_wrap=True, min_width=14)
    table.add_column("sent")
    columns = (
        "calls",
        "raw",
        "wire",
        "wire/raw",
        "error",
        "non-finite",
    )
    for column in columns:
        table.add_column(column, justify="right")
    seen = [total for total in totals if total.seen]
    for total in seen:
        table.add_row(
            total.flow.role,
            total.flow.collective,
            total.sent,
            f"{total.seen:,}",
            format_bytes(total.raw),
            format_bytes(total.wire),
            f"{total.ratio:.3f}" if total.ratio is not None else "-",
            f"{total.error:.2%}" if total.error is not None else "-",
            f"{total.nonfinite_blocks:,}",
        )
    if len(seen) > 1:
        raw, wire = sum(total.raw for total in seen), sum(total.wire for total in seen)
        table.add_section()
        table.add_row(
            "all",
            "",
            f"{sum(total.compressed for total in seen):,} compressed",
            f"{sum(total.seen for total in seen):,}",
            format_bytes(raw),
            format_bytes(wire),
            f"{wire / raw:.3f}" if raw else "-",
            "",
            f"{sum(total.nonfinite_blocks for total in seen):,}",
        )
    return table


def make_console(stream: IO[str]) -> Console:
    """A console on ``stream``, wide enough for the table when the stream is not a terminal."""
    return Console(file=stream, width=None if stream.isatty() else 120, highlight=False)
