"""What the policy `auto` measured and decided, for the console."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from megatron_taco.collectives.policy import Measured, Policy
from megatron_taco.telemetry.console import format_bytes


def format_rate(bytes_per_s: float) -> str:
    """A rate in GB/s or MB/s (decimal) with two significant digits, or more before the point."""
    value, unit = (bytes_per_s / 1e9, "GB/s") if bytes_per_s >= 1e9 else (bytes_per_s / 1e6, "MB/s")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def policy_table(policy: Policy, title: str) -> Table:
    """A row for each message that was measured."""
    table = Table(title=title, title_justify="left")
    table.add_column("role", no_wrap=True)
    table.add_column("collective", no_wrap=True)
    for column in ("MiB", "plain ms", "compressed ms", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("decision")
    for item in policy.measured:
        table.add_row(
            item.role,
            item.collective,
            f"{item.nbytes / 2**20:.4g}",
            f"{item.plain_s * 1e3:.3f}",
            f"{item.compressed_s * 1e3:.3f}",
            f"{item.plain_s / item.compressed_s:.2f}",
            "compressed" if item.compress else "plain",
        )
    return table


def explain(item: Measured) -> str:
    """What speaks for a decision, and what it would take to turn it."""
    link = f"this link gives {format_rate(item.rate)}"
    at = format_rate(item.break_even)
    if item.compress:
        bound = f"up to about {at}" if item.overhead_known else f"at least up to {at}"
        return (
            f"compressed is {item.plain_s / item.compressed_s:.2f}x as fast here: it wins on links "
            f"{bound}, {link}"
        )
    if item.wire >= item.raw:
        return "plain is faster here: this compressor sends no fewer bytes"
    if item.compressed_s < item.plain_s:
        saved = 1 - item.compressed_s / item.plain_s
        return (
            f"plain is taken here: compression saves only {saved:.1%}; break-even at {at}, {link}"
        )
    return f"plain is faster here: break-even at {at}, {link}"


def explanations(policy: Policy) -> list[str]:
    """A line for each message that was measured; messages that share a measurement share a line."""
    lines: dict[str, list[Measured]] = {}
    for item in policy.measured:
        where = f"{item.collective} of {format_bytes(item.nbytes)}: {explain(item)}"
        lines.setdefault(where, []).append(item)
    return [f"{_roles(items)} {where}" for where, items in lines.items()]


def _roles(items: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(item.role for item in items))
