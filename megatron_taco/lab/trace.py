"""How much communication hides behind compute: ``python -m megatron_taco.lab.trace TRACE...``.

Reads Chrome traces of torch's profiler, such as Megatron writes to ``torch_profile/rank-N.json.gz``
in the run folder with

    megatron: {profile: true, use_pytorch_profiler: true, profile_step_start: 6,
               profile_step_end: 8, profile_ranks: [0]}
    telemetry: {tensorboard: true}

For the kernels of NCCL it counts those beside which a matrix product ran, and adds up how long at
least one ran (``communication``), for how much of that a matrix product ran as well (``under
products``) or any other kernel (``hidden``), and the rest (``exposed``): the device had nothing
else to do. All are lengths of unions of intervals, so kernels side by side count once. The exposed
share f of the traced time is what a compression by k can shorten: to 1 - f + f / k at best.

A kernel belongs to the backward pass if a thread launched it that runs autograd's functions;
recomputation is therefore backward. The kernels of one process are seen: of ranks that share a GPU
those of the others are not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["communication", "product", "other"]
Interval = tuple[float, float]

_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma|splitk", re.IGNORECASE)
_NO_PRODUCT = re.compile(r"flash|fmha|attention", re.IGNORECASE)


class TraceError(Exception):
    """A file is no trace of a GPU, with the file and what was found."""


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel.

    Attributes:
        name: the kernel's.
        start: when it began, in microseconds.
        end: when it ended, in microseconds.
        backward: whether it was launched from the backward pass.
    """

    name: str
    start: float
    end: float
    backward: bool

    @property
    def kind(self) -> Kind:
        """What it does, from its name: NCCL's, cuBLAS's and CUTLASS's are known."""
        if self.name.startswith("nccl"):
            return "communication"
        if _PRODUCT.search(self.name) and not _NO_PRODUCT.search(self.name):
            return "product"
        return "other"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Times of some communication kernels in milliseconds.

    Attributes:
        kernels: how many there were.
        with_product: how many of them ran while a matrix product ran.
        communication: during which at least one ran.
        under_products: of that, during which a matrix product ran as well.
        hidden: of that, during which any kernel that is no communication ran as well.
    """

    kernels: int
    with_product: int
    communication: float
    under_products: float
    hidden: float

    @property
    def exposed(self) -> float:
        """Milliseconds during which only communication ran."""
        return self.communication - self.hidden


def read_kernels(path: Path) -> list[Kernel]:
    """Read the kernels of a Chrome trace, ``.json`` or ``.json.gz``, in the order of their start.

    Raises:
        TraceError: The file cannot be read, is no trace, or holds no kernel.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as a trace: {error}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise TraceError(f"{path}: no traceEvents; expected a Chrome trace of torch's profiler")
    kernels = kernels_of(events)
    if not kernels:
        raise TraceError(f"{path}: holds no GPU kernel; profile a run on a GPU")
    return kernels


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """The kernels among the events of a Chrome trace, in the order of their start."""
    complete = [event for event in events if event.get("ph") == "X"]
    autograd = {
        (event["pid"], event["tid"])
        for event in complete
        if str(event["name"]).startswith("autograd::engine::evaluate_function")
    }
    launched_by = {
        event["args"]["correlation"]: (event["pid"], event["tid"])
        for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    kernels = [
        Kernel(
            name=event["name"],
            start=float(event["ts"]),
            end=float(event["ts"]) + float(event["dur"]),
            backward=launched_by.get(event.get("args", {}).get("correlation")) in autograd,
        )
        for event in complete
        if event.get("cat") == "kernel"
    ]
    return sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))


def overlap(kernels: Sequence[Kernel], *, backward: bool | None = None) -> Overlap:
    """Add up what communicates and what of it hides behind other kernels.

    Args:
        kernels: all kernels of one process, in any order.
        backward: take only the communication of the backward pass (True) or only that of
            everything else (False); compute counts wherever it was launched.
    """
    sent = [
        kernel
        for kernel in kernels
        if kernel.kind == "communication" and backward in (None, kernel.backward)
    ]
    communication = _union(sent)
    products = _union(kernel for kernel in kernels if kernel.kind == "product")
    compute = _union(kernel for kernel in kernels if kernel.kind != "communication")
    return Overlap(
        kernels=len(sent),
        with_product=sum(bool(_common([(k.start, k.end)], products)) for k in sent),
        communication=_length(communication),
        under_products=_length(_common(communication, products)),
        hidden=_length(_common(communication, compute)),
    )


def traced_ms(kernels: Sequence[Kernel]) -> float:
    """Milliseconds from the start of the first kernel to the end of the last."""
    return (max(k.end for k in kernels) - min(k.start for k in kernels)) / 1000


def _union(kernels: Iterable[Kernel]) -> list[Interval]:
    """Disjoint intervals in order that cover what the kernels cover."""
    union: list[Interval] = []
    for start, end in sorted((kernel.start, kernel.end) for kernel in kernels):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def _common(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """What two lists of disjoint intervals in order have in common, likewise."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals) / 1000


def table(kernels: Sequence[Kernel]) -> list[str]:
    """The figures of one trace as lines of a Markdown table."""
    total = traced_ms(kernels)
    lines = [
        "| pass | NCCL kernels | with a product meanwhile | communication ms | under products | "
        "hidden | exposed ms | exposed share f |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, backward in (("forward and rest", False), ("backward", True), ("all", None)):
        found = overlap(kernels, backward=backward)
        whole = found.communication or 1.0
        lines.append(
            f"| {name} | {found.kernels} | {found.with_product} | {found.communication:.2f} | "
            f"{found.under_products / whole:.1%} | {found.hidden / whole:.1%} | "
            f"{found.exposed:.2f} | {found.exposed / total:.3f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 0, or 2 for a file that is no trace of a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_taco.lab.trace",
        description="How much of a run's communication hides behind compute, from its trace.",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    for path in parser.parse_args(argv).traces:
        try:
            kernels = read_kernels(path)
        except TraceError as error:
            print(f"megatron_taco.lab.trace: {error}", file=sys.stderr)
            return 2
        print(f"{path}: {len(kernels)} kernels in {traced_ms(kernels):.1f} ms\n")
        print("\n".join(table(kernels)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
