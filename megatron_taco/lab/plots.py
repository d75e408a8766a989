"""Plots of the benchmarks' reports, each from the JSON alone. Needs matplotlib only when it draws.

A bar is a median, its whisker the least and the most, and the black mark over it what could be
reached: raw / wire bytes for a collective, the limit without overlap for a training step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_taco.lab import loss_report
from megatron_taco.lab.link import RankLink
from megatron_taco.lab.loss_report import UNCOMPRESSED
from megatron_taco.lab.study_plot import curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]

_COLOURS: Final = {
    "e4m3": "#0072b2",
    "e5m2": "#56b4e9",
    "int8": "#009e73",
    "int6": "#e69f00",
    "int4": "#d55e00",
}
_OTHER: Final = "#999999"
_PALE: Final = 0.55
_WINDOW: Final = 20
"""Steps that a point of a loss's curve is the mean of."""
_UPRIGHT: Final = 20
"""Bars up to which their figures stand upright in them."""
_TALL: Final = 0.2
"""Share of the highest bar or mark above which a bar holds its figure."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a group.

    Attributes:
        group: What stands below the group.
        format: The code format, which names the colour; with more words after it a paler one.
        value: Its height.
        low: Lower end of the whisker.
        high: Upper end.
        mark: Height of the mark, or None.
    """

    group: str
    format: str
    value: float
    low: float
    high: float
    mark: float | None = None


def draw(report: Report, path: Path) -> None:
    """Draws the report of a benchmark into a ``.png`` or ``.svg`` file.

    Args:
        report: What the benchmark writes with ``--json``.
        path: Where to.

    Raises:
        ValueError: There is no plot of such a report.
    """
    kind = report.get("benchmark")
    if kind not in _DRAWERS:
        raise ValueError(
            f"no plot of a report with benchmark {kind!r}; allowed: {', '.join(_DRAWERS)}"
        )
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and the same report gives the same bytes.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "megatron-taco", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(layout="constrained")
        _DRAWERS[kind](figure, report)
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=110, metadata=metadata)


def drawable(report: Report) -> bool:
    """Tells whether there is a plot of such a report."""
    return report.get("benchmark") in _DRAWERS


def where(report: Report) -> str:
    """Returns one line on the ranks, the device and the link of a report."""
    about, place = report["about"], report.get("place")
    link = str(RankLink.of(place).link).split(", burst")[0] if place else "no emulated link"
    if about.get("nccl_p2p_disable", "0") != "0":
        link += ", NCCL_P2P_DISABLE=1"
    shared = " shared by all ranks" if place and place["shared_gpu"] else ""
    return f"{about['ranks']} ranks, {about['device']}{shared}, {link}"


def _kernels(figure: Figure, report: Report) -> None:
    bars = [
        Bar(
            group=row["name"].replace("_", " "),
            format=row["format"],
            value=row["share"],
            low=row["share"] * row["low"] / row["gigabytes_per_second"],
            high=row["share"] * row["high"] / row["gigabytes_per_second"],
        )
        for row in report["rows"]
        if row["name"] != "copy" and "plain torch" not in row["name"]
    ]
    figure.set_size_inches(9, 3.6)
    axes = figure.subplots()
    _bars(axes, bars)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("share of a copy's bytes a second")
    axes.set_title(f"Kernels, {report['gpu']}, {report['elements'] / 2**20:.4g} Mi BF16 elements")


def _collectives(figure: Figure, report: Report) -> None:
    sizes = sorted({row["size"] for row in report["rows"]})
    figure.set_size_inches(9, 0.6 + 2.6 * len(sizes))
    for axes, size in zip(_column(figure, len(sizes)), sizes, strict=True):
        bars = [
            Bar(
                group=_operation(row),
                format=code(row),
                value=row["ratio"],
                low=min(_ratios(row)),
                high=max(_ratios(row)),
                mark=row["raw"] / row["wire"] if row["wire"] else None,
            )
            for row in report["rows"]
            if row["size"] == size
        ]
        _bars(axes, bars)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel("times as fast as plain")
        axes.set_title(f"{size / 2**20:.4g} MiB", fontsize=9)
    figure.suptitle(f"Collectives, {where(report)}; marks: raw / wire bytes", fontsize=9)


def code(row: Mapping[str, Any]) -> str:
    """Returns the code of a row of ``bench collectives``: its format, and what is not the rule."""
    words = [row["format"]]
    if row["rotation"] != "hadamard":
        words.append("unrotated")
    if row["scales"] != "dual":
        words.append(row["scales"].replace("_", " "))
    return " ".join(words)


def _operation(row: Mapping[str, Any]) -> str:
    name = row["operation"].replace("_", "-")
    return name if row["algorithm"] == "-" else f"{name}\n{row['algorithm'].replace('_', '-')}"


def _ratios(row: Mapping[str, Any]) -> list[float]:
    return [plain / ours for plain, ours in zip(row["plain_s"], row["ours_s"], strict=True)]


def _step(figure: Figure, report: Report) -> None:
    arms = [arm for arm in report["arms"] if arm["limit"] is not None]
    bars = [
        Bar(
            group=f"{arm['arm']}\n{arm['share_of_limit']:.0%} of the limit",
            format=arm["arm"],
            value=arm["ratio"],
            low=min(arm["ratios"]),
            high=max(arm["ratios"]),
            mark=arm["limit"],
        )
        for arm in arms
    ]
    figure.set_size_inches(1.5 + 1.5 * max(3, len(bars)), 3.6)
    axes = figure.subplots()
    _bars(axes, bars, legend=False)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("times as fast as the plain step")
    axes.set_title(
        f"Training step, {report['about']['model']}, {where(report)};\n"
        "marks: limit without overlap",
        fontsize=9,
    )


def _losses(figure: Figure, report: Report) -> None:
    layouts = report["layouts"].values()
    figure.set_size_inches(9, 0.6 + 2.8 * len(layouts))
    for axes, layout in zip(_column(figure, len(layouts)), layouts, strict=True):
        plain = _smooth(layout["runs"][UNCOMPRESSED]["loss"])
        for name, run in layout["runs"].items():
            if name == UNCOMPRESSED:
                continue
            change = [100 * (b / a - 1) for a, b in zip(plain, _smooth(run["loss"]), strict=True)]
            steps = range(_WINDOW, _WINDOW + len(change))
            axes.plot(steps, change, color=_COLOURS.get(name, _OTHER), label=name.upper())
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss against uncompressed, %,\nmean of {_WINDOW} steps")
        axes.set_title(f"{report['about']['model']}, {layout['title']}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _smooth(losses: Sequence[float | None]) -> list[float]:
    numbers = [loss_report.number(loss) for loss in losses]
    return [statistics.mean(numbers[i : i + _WINDOW]) for i in range(len(numbers) - _WINDOW + 1)]


def _column(figure: Figure, count: int) -> list[Axes]:
    return [row[0] for row in figure.subplots(count, 1, squeeze=False)]


def _bars(axes: Axes, bars: Sequence[Bar], *, legend: bool = True) -> None:
    """Draws the bars, those of a group side by side, in the order of their formats."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    formats = list(dict.fromkeys(bar.format for bar in bars))
    # A group with one bar in a legendless plot stands in the middle of its label.
    slots = formats if legend else [""]
    width = 0.8 / len(slots)
    highest = max(max(bar.high, bar.mark or 0) for bar in bars)
    labelled: set[str] = set()
    for bar in bars:
        slot = slots.index(bar.format) if legend else 0
        x = groups.index(bar.group) + (slot - (len(slots) - 1) / 2) * width
        name, _, rest = bar.format.partition(" ")
        label = None if bar.format in labelled else f"{name.upper()} {rest}".strip()
        labelled.add(bar.format)
        alpha = _PALE if rest else 1
        colour = _COLOURS.get(name, _OTHER)
        axes.bar(x, bar.value, width * 0.9, color=colour, alpha=alpha, label=label)
        axes.vlines(x, bar.low, bar.high, color="black", linewidth=1)
        if bar.mark is not None:
            axes.hlines(bar.mark, x - width * 0.45, x + width * 0.45, color="black", linewidth=2)
        inside = bar.value > _TALL * highest
        axes.text(
            x,
            0.015 * highest if inside else max(bar.value, bar.high) + 0.015 * highest,
            f"{bar.value:.2f}",
            color="white" if inside else "black",
            ha="center",
            va="bottom",
            fontsize=7,
            rotation=90 if len(bars) > _UPRIGHT else 0,
        )
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylim(0, highest * 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


_DRAWERS: Final[dict[str, Callable[[Figure, Report], None]]] = {
    "kernels": _kernels,
    "collectives": _collectives,
    "step": _step,
    "losses": _losses,
    "study": curves,
}
