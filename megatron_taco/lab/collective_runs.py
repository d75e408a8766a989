"""Measures the cases of ``bench collectives`` on this rank, and reports them on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_taco.collectives import NodeGroups, Topology
from megatron_taco.lab import link_check, plots
from megatron_taco.lab.collective_cases import Case, cases, compressors
from megatron_taco.lab.link import LabError, RankLink
from megatron_taco.lab.timing import Timer, process_group

_GPU_SIZES = [1 << 20, 16 << 20, 128 << 20]
_CPU_SIZES = [1 << 20, 4 << 20]
_ALGORITHMS = ("one_shot", "two_shot")
_CHECK_BURSTS = 128
"""Bursts that the link check's message has at least, so that one burst does not fail it."""
_BURST_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one case; seconds of the slowest rank, one for each repetition.

    Attributes:
        operation: The collective.
        size: Bytes of the whole tensor.
        format: The code format.
        rotation: ``hadamard`` or ``none``.
        scales: How scales are sent.
        algorithm: For an all-reduce.
        raw: Bytes a rank sends plain.
        wire: Bytes a rank sends compressed.
        inter_node: What of ``wire`` goes to other nodes, where the group spans some.
        plain_s: Of the backend's call.
        ours_s: Of the compressed call, each just after the plain one at the same place.
        error: Relative RMS difference of our result from the backend's.
        extra: Bytes of device memory that our call needed on this rank beside its tensors, at
            most; None on CPUs.
    """

    operation: str
    size: int
    format: str
    rotation: str
    scales: str
    algorithm: str
    raw: int
    wire: int
    inter_node: int
    plain_s: list[float]
    ours_s: list[float]
    error: float
    extra: int | None

    @property
    def ratios(self) -> list[float]:
        """How many times as fast as plain, pair by pair."""
        return [a / b for a, b in zip(self.plain_s, self.ours_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the pairs."""
        return statistics.median(self.ratios)


def measure(args: argparse.Namespace) -> int:
    """Runs all cases, prints the table and writes the JSON on rank 0.

    Returns:
        0; 1 if the lab's link did not pass its own check, which the report says too.
    """
    place = RankLink.from_environment()
    with process_group() as (group, device):
        if device.type == "cpu":
            torch.set_num_threads(1)
        sizes = args.sizes or (_GPU_SIZES if device.type == "cuda" else _CPU_SIZES)
        checks: list[link_check.Check] = []
        if place is not None:
            size = max(*sizes, _CHECK_BURSTS * place.link.burst)
            checks = link_check.measure(group, device, place, [size], repeats=2)
        nodes = _nodes(args, group)
        rows = [
            _measure_case(case, Timer(group, device, args.silence / 1e6), args.repeats)
            for case in cases(
                group,
                device,
                sizes=sizes,
                operations=args.operations,
                compressors=compressors(args.formats, args.rotation, args.scales, args.block),
                algorithms=args.algorithms
                or (_ALGORITHMS if nodes is None else (*_ALGORITHMS, "hierarchical")),
                nodes=nodes,
                chunks=args.chunks,
            )
        ]
        usable = all(check.honest for check in checks)
        if group.rank() == 0:
            about = _about(args, group, device)
            if place is not None:
                link_check.show(place, checks)
            _show(rows, about, place, usable)
            report = _report(rows, about, place, checks, usable)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            if args.plot is not None:
                plots.draw(report, args.plot)
        rank = group.rank()
    return 1 if rank == 0 and not usable else 0


def _nodes(args: argparse.Namespace, group: ProcessGroup) -> NodeGroups | None:
    """The sub-groups of a group that spans nodes.

    Raises:
        LabError: ``hierarchical`` is asked for and it does not.
    """
    topology = Topology()
    if "hierarchical" not in (args.algorithms or ()):
        return topology.of(group)
    try:
        return topology.require(group)
    except ValueError as error:
        raise LabError(f"--algorithms: {error}") from None


def _measure_case(case: Case, timer: Timer, repeats: int) -> Row:
    """Times plain, ours, plain, ours, ...; the first pair warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    extra = None
    for repeat in range(repeats + 1):
        for call, times in zip((case.plain, case.ours), seconds, strict=True):
            call.prepare()
            before = _memory(call.result)
            elapsed = timer.time(call.run)
            if repeat:
                times.append(elapsed)
            elif before is not None:
                extra = torch.cuda.max_memory_allocated() - before  # at last of ours
    # The results are those of the last pair; all pairs have the same inputs.
    exact = case.plain.result.float()
    sums = torch.stack([(case.ours.result.float() - exact).square().sum(), exact.square().sum()])
    difference, whole = timer.total(sums.double())
    slowest = timer.slowest([*seconds[0], *seconds[1]])
    return Row(
        operation=case.operation,
        size=case.size,
        format=case.format,
        rotation=case.rotation,
        scales=case.scales,
        algorithm=case.algorithm,
        raw=case.traffic.raw,
        wire=case.traffic.wire,
        inter_node=case.traffic.inter_node,
        plain_s=slowest[:repeats],
        ours_s=slowest[repeats:],
        error=(difference / whole) ** 0.5,
        extra=extra,
    )


def _memory(result: torch.Tensor) -> int | None:
    """Bytes of device memory in use now, from where the peak is counted anew; None on CPUs."""
    if not result.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _about(args: argparse.Namespace, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    from megatron_taco.training.run_folder import environment

    found = environment()
    return {
        "ranks": group.size(),
        "backend": dist.get_backend(group),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpus": found["cpus"],
        "python": found["python"],
        "platform": found["platform"],
        "cuda": found["cuda"],
        "versions": found["versions"],
        "block": args.block,
        "chunks": args.chunks,
        "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "repeats": args.repeats,
        "silence_s": args.silence / 1e6,
    }


def _report(
    rows: list[Row],
    about: dict[str, Any],
    place: RankLink | None,
    checks: list[link_check.Check],
    usable: bool,
) -> dict[str, Any]:
    return {
        "benchmark": "collectives",
        "about": about,
        "place": asdict(place) if place else None,
        "link_check": [{**asdict(check), "share": check.share} for check in checks],
        "usable": usable,
        "rows": [
            {
                **asdict(row),
                "plain_median_s": statistics.median(row.plain_s),
                "ours_median_s": statistics.median(row.ours_s),
                "ratio": row.ratio,
            }
            for row in rows
        ],
    }


def _show(rows: list[Row], about: dict[str, Any], place: RankLink | None, usable: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    where = "all ranks on one GPU, " if place and place.shared_gpu else ""
    console.print(
        f"{about['ranks']} ranks, {about['backend']}, {about['device']}, {where}"
        f"{place.link if place else 'the links that are there'}; torch "
        f"{about['versions']['torch']}, BF16, block {about['block']}, "
        f"{'default' if about['chunks'] is None else about['chunks']} chunks; "
        f"medians of {about['repeats']} pairs plain, ours, each after "
        f"{about['silence_s'] * 1e3:.0f} ms of silence; least-most in brackets"
    )
    table = Table(title=None if usable else "UNUSABLE: the link is faster than it says")
    for name in ("operation", "format", "scales", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("MiB", "plain ms", "ours ms", "plain / ours", "raw / wire", "error", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    flattered = False
    for row in rows:
        mark = place is not None and place.link.burst > _BURST_SHARE * row.wire
        flattered |= mark
        table.add_row(
            row.operation,
            row.format if row.rotation == "hadamard" else f"{row.format} unrotated",
            row.scales,
            row.algorithm,
            f"{row.size / 2**20:.4g}{'*' if mark else ''}",
            _spread([1e3 * seconds for seconds in row.plain_s]),
            _spread([1e3 * seconds for seconds in row.ours_s]),
            _spread(row.ratios),
            f"{row.raw / row.wire:.2f}" if row.wire else "-",
            f"{row.error:.2%}",
            "-" if row.extra is None else f"{row.extra / row.size:.2f}",
        )
    console.print(table)
    if any(row.extra is not None for row in rows):
        console.print("memory: what the call allocates at most, in sizes of the whole tensor")
    if flattered:
        console.print(
            f"* the link's bucket is more than {_BURST_SHARE:.0%} of what a rank sends compressed: "
            "that part goes at once, which flatters ours"
        )


def _spread(values: list[float]) -> str:
    digits = 0 if max(values) >= 1000 else 1 if max(values) >= 10 else 2
    middle, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}-{high})"
