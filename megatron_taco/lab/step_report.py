"""What the steps of ``bench step`` say: times by arm, ratios of neighbours, and the limit.

With f the exposed share of the axis's communication in a plain step and k raw / wire bytes of an
arm, a step without overlap cannot be faster than 1 / (1 - f + f / k) times the plain one. In a
pipeline that is what a step gains whose critical path stays the same; where shorter messages make
another one critical it gains more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_taco.lab.rates import wire_seconds
from megatron_taco.lab.step_schedule import FP32, PLAIN, SILENT, Schedule, Turn


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What was measured of one arm.

    Attributes:
        arm: ``plain``, ``silent`` or the name of a compressed one.
        step_s: Seconds of each counted step, of the slowest rank.
        raw: Bytes a rank would send in a step over a plain ring or to its neighbours, of all that
            the axis compresses in some arm; the mean of the ranks, as below.
        wire: Bytes it does send.
        calls: Collectives or messages in a step.
        compressed: Compressed ones.
        link_s: Seconds that ``wire`` bytes need at the link's rate, or None without a known link.
        peak_bytes: Device memory that tensors took at most; 0 on CPUs.
        ratios: How many times as fast as plain, a figure for each cycle: the mean of the plain
            turns before and after over the turn, each by its median step.
        limit: What the ratio can be at most without overlap; None for ``plain`` and ``silent``.
    """

    arm: str
    step_s: list[float]
    raw: int
    wire: int
    calls: int
    compressed: int
    link_s: float | None
    peak_bytes: int
    ratios: list[float]
    limit: float | None

    @property
    def median_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    @property
    def ratio(self) -> float:
        """The median of the cycles."""
        return statistics.median(self.ratios)

    @property
    def share(self) -> float | None:
        """The ratio's share of the limit."""
        return None if self.limit is None else self.ratio / self.limit

    def record(self) -> dict[str, Any]:
        """Returns it for JSON."""
        derived = {"median_s": self.median_s, "ratio": self.ratio, "share_of_limit": self.share}
        return {**asdict(self), **derived}


def exposed_shares(turns: Sequence[tuple[Turn, float]]) -> list[float]:
    """Returns f of each cycle: 1 - silent / plain, from the turns that count and their medians."""
    return [1 - 1 / ratio for ratio in _ratios(turns, SILENT)]


def limit(exposed: float, raw: int, wire: int) -> float:
    """Returns 1 / (1 - f + f / k).

    Args:
        exposed: f, from 0 to 1; noise outside counts as the nearer of the two.
        raw: Bytes of a plain step.
        wire: Bytes of a compressed one, above 0.
    """
    f = min(1.0, max(0.0, exposed))
    return 1 / (1 - f + f * wire / raw)


def arms(
    schedule: Schedule,
    *,
    seconds: Sequence[float],
    raw: Sequence[int],
    wire: Sequence[int],
    calls: Sequence[int],
    compressed: Sequence[int],
    peak_bytes: Sequence[int],
    rate: int | None,
) -> tuple[list[Arm], list[float]]:
    """Returns the arms in the order of their first turns, and f of each cycle.

    Args:
        schedule: The turns.
        seconds: Of each step of the schedule; the other sequences likewise.
        raw: Bytes for a plain ring.
        wire: Bytes sent.
        calls: Collectives.
        compressed: Compressed ones.
        peak_bytes: Device memory at most.
        rate: Bits per second of the link that each rank has for itself, or None.
    """
    counted = schedule.counted()
    turns = [(t, statistics.median(seconds[i] for i in steps)) for t, steps in counted]
    shares = exposed_shares(turns)
    found = []
    for name in dict.fromkeys(turn.arm for turn, _ in counted):
        steps = [i for turn, numbers in counted if turn.arm == name for i in numbers]
        one = steps[0]  # bytes and calls are the same in every step of an arm
        bounded = bool(shares) and name not in (PLAIN, SILENT)
        found.append(
            Arm(
                arm=name,
                step_s=[seconds[i] for i in steps],
                raw=raw[one],
                wire=wire[one],
                calls=calls[one],
                compressed=compressed[one],
                link_s=wire_seconds(wire[one], rate) if rate else None,
                peak_bytes=max(peak_bytes[i] for i in steps),
                ratios=_ratios(turns, name),
                limit=limit(statistics.median(shares), raw[one], wire[one]) if bounded else None,
            )
        )
    return found, shares


def _ratios(turns: Sequence[tuple[Turn, float]], arm: str) -> list[float]:
    plain = {turn.cycle: seconds for turn, seconds in turns if turn.arm == PLAIN}
    if arm == PLAIN:
        return [1.0]
    return [
        (plain[turn.cycle] + plain[turn.cycle + 1]) / 2 / seconds
        for turn, seconds in turns
        if turn.arm == arm
    ]


def flows(schedule: Schedule, sent: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Returns what all ranks sent in a step of each arm, by role and collective, for JSON.

    Args:
        schedule: The turns.
        sent: Of each step: flow -> raw bytes, wire bytes, calls, compressed calls.
    """
    names = ("raw", "wire", "calls", "compressed")
    return {
        turn.arm: {
            flow: dict(zip(names, numbers, strict=True)) for flow, numbers in sent[steps[0]].items()
        }
        for turn, steps in schedule.counted()
    }


def table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of a report's table, for a console or Markdown.

    Args:
        report: As written by ``bench step --json``.
    """
    head = ["arm", "ms a step", "plain / arm", "limit", "share", "raw / wire", "link ms", "GiB"]
    rows = []
    for arm in report["arms"]:
        lone = arm["arm"] in (PLAIN, SILENT)
        rows.append(
            [
                arm["arm"],
                spread([1e3 * s for s in arm["step_s"]]),
                "-" if arm["arm"] == PLAIN else spread(arm["ratios"]),
                "-" if arm["limit"] is None else f"{arm['limit']:.2f}",
                "-" if arm["limit"] is None else f"{arm['share_of_limit']:.1%}",
                "-" if lone else f"{arm['raw'] / arm['wire']:.2f}",
                "-" if arm["link_s"] is None else f"{1e3 * arm['link_s']:.0f}",
                f"{arm['peak_bytes'] / 2**30:.2f}" if arm["peak_bytes"] else "-",
            ]
        )
    for name, seconds in report["other_uncompressed"].items():
        times = spread([1e3 * s for s in seconds])
        rows.append([f"plain, {name}", times, *["-"] * (len(head) - 2)])
    return head, rows


def notes(report: Mapping[str, Any]) -> list[str]:
    """Returns the sentences under a report's table."""
    lines = []
    axis = report["about"].get("axis", "tensor")
    if report["exposed"]:
        f = statistics.median(report["exposed"])
        low, high = min(report["exposed"]), max(report["exposed"])
        what = "communication on all axes" if axis == "all" else f"{axis}-parallel communication"
        lines.append(
            f"Exposed share of {what} in a plain step: f = {f:.3f} ({low:.3f} - {high:.3f}); "
            "limit = 1 / (1 - f + f·wire/raw)."
        )
        if axis in ("pipeline", "all"):
            lines.append(
                "Silent: messages between stages are one element long, so that stages still wait "
                "for each other."
            )
        lines += [line for work in report.get("work", ()) for line in _work(work, report, f)]
    lines += _against_fp32(report["arms"])
    plain = next(arm["median_s"] for arm in report["arms"] if arm["arm"] == PLAIN)
    compressed = [arm for arm in report["arms"] if arm["arm"] not in (PLAIN, SILENT)]
    for name, seconds in report["other_uncompressed"].items():
        other = statistics.median(seconds)
        told = ", ".join(f"{arm['arm']} {other / arm['median_s']:.2f}" for arm in compressed)
        lines.append(
            f"Uncompressed with {name}, in a run of its own: {plain / other:.2f} times as fast as "
            f"plain here; times as fast as that: {told}."
        )
    return lines


def _work(work: Mapping[str, Any], report: Mapping[str, Any], exposed: float) -> list[str]:
    """Sentences on what a boundary itself costs, and on the exchange of its projector."""
    name = work["arm"]
    lines = [
        f"{name}, a stage by itself: {1e3 * work['micro_batch_s']:.3g} ms a micro-batch and "
        f"{1e3 * work['step_s']:.3g} ms a step of its own work, {work['share']:.2%} of the stage's "
        f"{1e3 * work['compute_s']:.3g} ms a micro-batch."
    ]
    arm = next((arm for arm in report["arms"] if arm["arm"] == name), None)
    if work["exchange_bytes"]:
        size = work["exchange_bytes"]
        line = (
            f"{name}, exchange of the projector's gradient: {size / 1e6:.3g} MB each way a step, "
            f"{1e3 * work['exchange_s']:.3g} ms by itself"
        )
        if arm is not None:
            bound = limit(exposed, arm["raw"], arm["wire"] + size)
            line += (
                f"; with its bytes counted the limit is {bound:.2f}, of which {name} reaches "
                f"{arm['ratio'] / bound:.1%}"
            )
        lines.append(f"{line}.")
    return lines


def _against_fp32(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on the arms beside uncompressed FP32 communication, where that is one of them.

    It sends more than a plain step, so its own limit is below 1, and divides theirs.
    """
    wide = next((arm for arm in arms if arm["arm"] == FP32), None)
    if wide is None or wide["limit"] is None:
        return []
    told = ", ".join(
        f"{arm['arm']} {arm['ratio'] / wide['ratio']:.2f} (limit "
        f"{arm['limit'] / wide['limit']:.2f})"
        for arm in arms
        if arm["limit"] is not None and arm is not wide
    )
    return [f"Times as fast as with FP32 tensor-parallel messages, uncompressed: {told}."]


def describe(report: Mapping[str, Any]) -> str:
    """Returns the model, the layout and the turns of a report."""
    about = report["about"]
    ranks = about["tensor_model_parallel_size"] or 1
    parallel = f"tensor parallel {ranks}"
    if about["sequence_parallel"]:
        parallel += " with sequence parallelism"
    if (about["pipeline_model_parallel_size"] or 1) > 1:
        parallel += f", pipeline parallel {about['pipeline_model_parallel_size']}"
    if about.get("data_parallel_size", 1) > 1:
        parallel += f", data parallel {about['data_parallel_size']}"
        if about["use_distributed_optimizer"]:
            parallel += " with the distributed optimiser"
        parallel += f", gradients in {'BF16' if about['grad_reduce_in_bf16'] else 'FP32'}"
    codec = ""
    if about.get("axis", "tensor") in ("tensor", "all"):
        codec = f", block {about['block']}, scales {about['scales']}"
    return (
        f"{about['model']} ({about['num_layers']} layers, hidden {about['hidden_size']}, sequence "
        f"{about['seq_length']}, micro-batch {about['micro_batch_size']}, global batch "
        f"{about['global_batch_size']}), {parallel}, megatron-core "
        f"{about['versions']['megatron-core']}, torch attention{codec}; {about['cycles']} cycles "
        f"of {about['steps']} steps an arm, {about['settle']} before each not counted"
    )


def spread(values: Sequence[float]) -> str:
    """Returns the median with the least and the most, in as many digits as are worth reading."""
    digits = 0 if max(values) >= 1000 else 1 if max(values) >= 10 else 2
    middle, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}-{high})"
