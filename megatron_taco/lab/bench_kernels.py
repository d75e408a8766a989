"""Speed of the TACO kernels: ``python -m megatron_taco.lab.bench_kernels``.

Each call is timed as one of many in a replayed CUDA graph, over input sets that together are
larger than the L2 cache, beside a device-to-device copy of as many BF16 elements in the same run.
A share is bytes read and written over that time, over the same of the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_taco.compressors import Taco

FORMATS = ("e4m3", "e5m2", "int8", "int6", "int4")
CALLS = 8  # of a graph
REPLAYS = 25
INPUT_SETS = 3


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was called.
        format: Code format, or ``-``.
        microseconds: Median of a call.
        low: Tenth percentile of gigabytes per second, over replays.
        gigabytes_per_second: Median.
        high: Ninetieth percentile.
        share: Median over that of the copy.
    """

    name: str
    format: str
    microseconds: float
    low: float
    gigabytes_per_second: float
    high: float
    share: float


def parse_elements(text: str) -> int:
    """Return a number of elements: 1000, 512Ki or 64Mi.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi)?", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(
            f"elements is {text!r}, allowed is a positive number with or without "
            "Ki, Mi or Gi, for example 64Mi"
        )
    return int(match[1]) * {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[match[2]]


def time_calls(call: Callable[[Tensor], object], inputs: Sequence[Tensor]) -> list[float]:
    """Return seconds of one call, one figure for each replay of a graph of ``CALLS`` calls."""
    import torch

    for x in inputs:
        call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(CALLS):
            call(inputs[k % len(inputs)])
    seconds = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3 / CALLS)
    return seconds[2:]


def row(name: str, form: str, size: int, seconds: list[float], copy: float | None) -> Row:
    """Summarise calls that move ``size`` bytes; ``copy`` is the copy's gigabytes per second."""
    rates = sorted(size / s / 1e9 for s in seconds)
    middle = median(rates)
    tenth = len(rates) // 10
    return Row(
        name,
        form,
        median(seconds) * 1e6,
        rates[tenth],
        middle,
        rates[-1 - tenth],
        middle / (copy or middle),
    )


def measure(taco: Taco, elements: int, ranks: Sequence[int], copy: float, label: str) -> list[Row]:
    """Time each operation of ``taco`` on BF16 tensors of ``elements`` elements.

    Sums are of ``ranks`` payloads of as many elements each, or fewer where they would not fit.
    """
    import torch

    device = torch.device("cuda")
    size = taco.payload_bytes(elements)
    values = [
        torch.randn(1, elements, device=device, dtype=torch.bfloat16) for _ in range(INPUT_SETS)
    ]
    payloads = [taco.encode_rows(x) for x in values]
    moved = 2 * elements + size
    rows = [
        row(f"{label}encode", taco.format, moved, time_calls(taco.encode_rows, values), copy),
        row(
            f"{label}decode",
            taco.format,
            moved,
            time_calls(lambda p: taco.decode_rows(p, elements, torch.bfloat16), payloads),
            copy,
        ),
    ]
    for count in ranks:
        stacks = [
            taco.encode_rows(torch.randn(count, elements, device=device, dtype=torch.bfloat16))
            for _ in range(2)
        ]
        seconds = time_calls(lambda p: taco.reduce_encode(p, elements), stacks)
        name = f"{label}reduce_encode of {count}"
        rows.append(row(name, taco.format, (count + 1) * size, seconds, copy))
    seconds = time_calls(lambda p: taco.decode_sum(p, elements), [stacks[0]])
    moved = ranks[-1] * size + 4 * elements
    rows.append(row(f"{label}decode_sum of {ranks[-1]}", taco.format, moved, seconds, copy))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| call | format | µs | GB/s | 10% .. 90% | share of copy |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.name} | {r.format} | {r.microseconds:.1f} | {r.gigabytes_per_second:.0f} | "
            f"{r.low:.0f} .. {r.high:.0f} | {r.share:.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 if it cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_taco.lab.bench_kernels", description="Speed of the TACO kernels."
    )
    parser.add_argument("--elements", default="64Mi", help="of a tensor, for example 64Mi")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--block", type=int, default=256, choices=(32, 64, 128, 256, 512))
    parser.add_argument("--scales", default="dual", choices=("dual", "merged_fp32", "merged_bf16"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="payloads of sums")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)

    import torch

    from megatron_taco.compressors import Taco
    from megatron_taco.compressors.dispatch import ALL_KERNELS, kernels_on

    os.environ[ALL_KERNELS] = "1"

    try:
        elements = parse_elements(options.elements)
        gpu = torch.device("cuda", 0)
        if not torch.cuda.is_available() or kernels_on(gpu, "e4m3", "dual") is None:
            raise ValueError("the kernels need a CUDA device of compute capability 8.0 and Triton")
    except ValueError as error:
        print(f"bench_kernels: {error}", file=sys.stderr)
        return 2

    import triton

    sources = [
        torch.randn(elements, device="cuda", dtype=torch.bfloat16) for _ in range(INPUT_SETS)
    ]
    target = torch.empty_like(sources[0])
    rows = [row("copy", "-", 4 * elements, time_calls(target.copy_, sources), None)]
    copy = rows[0].gigabytes_per_second
    del sources, target
    for form in options.formats:
        taco = Taco(form, options.block, "hadamard", options.scales)
        rows += measure(taco, elements, options.ranks, copy, "")
        torch.cuda.empty_cache()
    plain = Taco(options.formats[0], options.block, "hadamard", options.scales).reference()
    rows += measure(plain, elements // 8, options.ranks[:1], copy, "plain torch, 1/8 the size: ")
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "elements": elements,
        "block": options.block,
        "scales": options.scales,
        "calls_a_graph": CALLS,
        "replays": REPLAYS,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
