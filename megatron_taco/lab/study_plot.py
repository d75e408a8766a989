"""The curves of a study: validation losses, and training losses against one arm."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS: Final = (
    *("#000000", "#0072b2", "#56b4e9", "#009e73", "#d55e00"),
    *("#cc79a7", "#e69f00", "#f0e442", "#999999"),
)
_SHARE: Final = 20
"""A point is the mean of this share of all steps."""


def curves(figure: Figure, report: Mapping[str, Any]) -> None:
    """Draw two plots side by side.

    Args:
        figure: An empty one.
        report: ``base``, ``title`` and ``arms``: by name ``loss``, one for each step, and
            ``validation``, pairs of step and loss.
    """
    figure.set_size_inches(11, 4)
    validation, training = figure.subplots(1, 2)
    arms = report["arms"]
    base = arms[report["base"]]["loss"]
    window = max(1, len(base) // _SHARE)
    for index, (name, arm) in enumerate(arms.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        style = "-" if index < len(_COLOURS) else "--"
        steps, losses = zip(*arm["validation"], strict=True)
        validation.plot(steps, losses, style, color=colour, marker=".", label=name)
        if name != report["base"] and len(arm["loss"]) == len(base):
            change = [
                100 * (ours / plain - 1)
                for ours, plain in zip(_mean(arm["loss"], window), _mean(base, window), strict=True)
            ]
            training.plot(range(window, len(base) + 1), change, style, color=colour)
    training.axhline(0, color="black", linewidth=0.8)
    validation.set_ylabel("validation loss")
    training.set_ylabel(f"training loss against {report['base']}, %, mean of {window} steps")
    for axes in (validation, training):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    shown = validation.get_legend_handles_labels()
    training.legend(*shown, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(report["title"], fontsize=9)


def _mean(losses: Sequence[float], window: int) -> list[float]:
    return [
        statistics.mean(losses[start : start + window]) for start in range(len(losses) - window + 1)
    ]
