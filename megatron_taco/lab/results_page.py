"""A page of results in Markdown, from the JSON of benchmarks.

Each section stands between two comments and is made anew each time. What stands outside of them is
written by hand and stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_taco.lab import loss_report, plots, step_report
from megatron_taco.lab.loss_report import UNCOMPRESSED
from megatron_taco.lab.markdown import markdown_table

Report = Mapping[str, Any]

_MS: Final = 1e3


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section.

    Attributes:
        name: Of its comments and its plot.
        title: Its heading.
        aim: What was to be reached; may be empty.
        report: What the benchmark wrote, with ``run``: command, date and commit.
        folder: Beside the page; gets the plot.
        plot: Whether there is one.
    """

    name: str
    title: str
    aim: str
    report: Report
    folder: Path
    plot: bool = True

    def lines(self) -> list[str]:
        """Returns the section and draws its plot."""
        run = self.report["run"]
        lines = [f"## {self.title}", ""]
        lines += [f"`{run['command']}`, {run['date']}, commit {run['commit']}.", ""]
        lines += [_SAYS[self.report["benchmark"]](self.report), ""]
        if self.aim:
            lines += [f"Aim: {self.aim}.", ""]
        if not self.report.get("usable", True):
            lines += ["**Unusable: the link was faster than it says.**", ""]
        lines += [*_TABLES[self.report["benchmark"]](self.report), ""]
        if not self.plot or not plots.drawable(self.report):
            return lines[:-1]
        plot = self.folder / f"{self.name}.svg"
        plots.draw(self.report, plot)
        return [*lines, f"![{self.title}]({self.folder.name}/{plot.name})"]


def write(page: Path, sections: Sequence[Section], title: str = "") -> None:
    """Writes the sections into a page, each in its place or else at the end.

    Args:
        page: A file that may be there already; then what is outside of the sections stays.
        sections: In their order.
        title: What a new page begins with; its name by default.
    """
    text = page.read_text(encoding="utf-8") if page.exists() else f"{title or heading(page)}\n"
    for section in sections:
        start, end = f"<!-- measured: {section.name} -->", f"<!-- end: {section.name} -->"
        block = "\n".join([start, *section.lines(), end])
        if start in text and end in text:
            before, _, rest = text.partition(start)
            text = before + block + rest.partition(end)[2]
        else:
            text = f"{text.rstrip()}\n\n{block}\n"
    page.write_text(text, encoding="utf-8")


def heading(page: Path) -> str:
    """Returns the title of a page that has no other: its name."""
    return f"# {page.stem.replace('-', ' ').capitalize()}"


def _collectives(report: Report) -> list[str]:
    head = ["operation", "algorithm", "format", "MiB", "plain ms", "ours ms"]
    head += ["plain / ours", "raw / wire", "error", "memory"]
    rows = []
    for row in report["rows"]:
        ratios = [a / b for a, b in zip(row["plain_s"], row["ours_s"], strict=True)]
        rows.append(
            [
                row["operation"],
                row["algorithm"],
                plots.code(row),
                f"{row['size'] / 2**20:.4g}",
                step_report.spread([_MS * s for s in row["plain_s"]]),
                step_report.spread([_MS * s for s in row["ours_s"]]),
                step_report.spread(ratios),
                f"{row['raw'] / row['wire']:.2f}" if row["wire"] else "-",
                f"{row['error']:.2%}",
                "-" if row["extra"] is None else f"{row['extra'] / row['size']:.2f}",
            ]
        )
    return [
        *markdown_table(head, rows),
        "",
        "Memory: what our call allocates at most, in sizes of the whole tensor.",
    ]


def _kernels(report: Report) -> list[str]:
    head = ["call", "format", "µs", "GB/s", "10% .. 90%", "share of copy", "host µs"]
    rows = [
        [
            row["name"],
            row["format"],
            f"{row['microseconds']:.1f}",
            f"{row['gigabytes_per_second']:.0f}",
            f"{row['low']:.0f} .. {row['high']:.0f}",
            f"{row['share']:.1%}",
            f"{row['host_microseconds']:.1f}",
        ]
        for row in report["rows"]
    ]
    return markdown_table(head, rows)


def _step(report: Report) -> list[str]:
    return [*markdown_table(*step_report.table(report)), "", *step_report.notes(report)]


def _losses(report: Report) -> list[str]:
    lines: list[str] = []
    for layout in report["layouts"].values():
        runs = layout["runs"]
        if layout["title"]:
            lines += [f"### {layout['title']}", ""]
        lines += markdown_table(*loss_report.table(runs, times=report["about"]["at_once"] == 1))
        off = loss_report.tail(runs[UNCOMPRESSED]["loss"])
        changes = {n: loss_report.tail(r["loss"]) / off - 1 for n, r in runs.items()}
        del changes[UNCOMPRESSED]
        told = ", ".join(f"{name} {change:+.2%}" for name, change in changes.items())
        lines += ["", f"Loss against uncompressed: {told}.", ""]
        for name, run in runs.items():
            if len(run["flows"]) and report["about"].get("bytes"):
                lines += [f"Sent in the run {name}, by all ranks:", ""]
                lines += [*markdown_table(*loss_report.flow_table(run)), ""]
    return lines[:-1]


def _table(report: Report) -> list[str]:
    lines: list[str] = []
    for table in report["tables"]:
        if table.get("title"):
            lines += [f"### {table['title']}", ""]
        lines += [*markdown_table(table["head"], table["rows"]), ""]
        lines += [line for note in table.get("notes", ()) for line in (note, "")]
    return lines[:-1]


def _ranks(report: Report) -> str:
    about, checks = report["about"], report["link_check"]
    text = (
        f"{plots.where(report)}; torch {about['versions']['torch']}, CUDA {about['cuda']}, Python "
        f"{about['python']}, BF16. Medians, least and most in brackets."
    )
    if checks:
        shares = [check["share"] for check in checks if check["pattern"] == "one way"]
        text += f" Link check, one way: {statistics.median(shares):.3f} × bytes / rate."
    return text


def _measured(report: Report) -> str:
    return f"Block {report['about']['block']}. {_ranks(report)}"


def _trained(report: Report) -> str:
    return f"{step_report.describe(report)}. {_ranks(report)}"


def _graphs(report: Report) -> str:
    return (
        f"{report['gpu']}, torch {report['torch']}, Triton {report['triton']}; "
        f"{report['elements'] / 2**20:.4g} Mi BF16 elements, block {report['block']}, scales "
        f"{report['scales']}; medians over {report['replays']} replays of a CUDA graph of "
        f"{report['calls_a_graph']} calls."
    )


_TABLES: Final[dict[str, Callable[[Report], list[str]]]] = {
    "kernels": _kernels,
    "collectives": _collectives,
    "step": _step,
    "losses": _losses,
    "table": _table,
    "study": lambda report: list(report["lines"]),
}
_SAYS: Final[dict[str, Callable[[Report], str]]] = {
    "kernels": _graphs,
    "collectives": _measured,
    "step": _trained,
    "losses": lambda report: str(report["about"]["text"]),
    "table": lambda report: str(report["about"]["text"]),
    "study": lambda report: str(report["about"]["text"]),
}
