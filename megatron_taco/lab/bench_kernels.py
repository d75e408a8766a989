"""``megatron-taco bench kernels``: the kernels of TACO and SDP4Bit beside a copy in the same run.

Each call is timed as one of many in a replayed CUDA graph, over input sets that together are
larger than the L2 cache. A share is bytes read and written over that time, over the same of a
device-to-device copy of as many BF16 elements. TACO's values are BF16, SDP4Bit's FP32, as the
data-parallel axis has them. Host time is that of a call that launches the same
kernel on a tensor so small that the GPU keeps up.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

from megatron_taco.cli.lab_arguments import checked, words
from megatron_taco.lab.plot_file import plot_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_taco.compressors import Compressor

FORMATS: Final = ("e4m3", "e5m2", "int8", "int6", "int4")
SCALES: Final = ("dual", "merged_fp32", "merged_bf16")
CALLS = 8  # of a graph
REPLAYS = 25
INPUT_SETS = 3
SMALL = 2**16  # elements where host time is measured
HOST_CALLS = 300
FRACTION = 8  # of the elements, for plain torch


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
        host_microseconds: Of the host, a call.
    """

    name: str
    format: str
    microseconds: float
    low: float
    gigabytes_per_second: float
    high: float
    share: float
    host_microseconds: float


def parse_elements(text: str) -> int:
    """Return a number of elements: 1000, 512Ki or 64Mi.

    Raises:
        ValueError: If it is none.
    """
    match = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi)?", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(
            f"{text!r} is not a positive number with or without Ki, Mi or Gi, for example 64Mi"
        )
    return int(match[1]) * {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[match[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``bench kernels``."""
    parser.add_argument(
        "--elements",
        type=checked(parse_elements),
        default=parse_elements("64Mi"),
        metavar="N",
        help="of a BF16 tensor, for example 64Mi (the default)",
    )
    parser.add_argument(
        "--formats",
        type=words(FORMATS),
        default=list(FORMATS),
        metavar="LIST",
        help=f"of {', '.join(FORMATS)} (default: all)",
    )
    parser.add_argument("--block", type=int, default=256, choices=(32, 64, 128, 256, 512))
    parser.add_argument("--scales", default="dual", choices=SCALES)
    parser.add_argument(
        "--ranks",
        type=words(("1", "2", "4", "8", "16")),
        default=["2", "4", "8"],
        metavar="LIST",
        help="payloads of the sums (default: 2,4,8)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw a .png or .svg")


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


def host_time(call: Callable[[Tensor], object], small: Tensor) -> float:
    """Return the median over three of the host's seconds for one of ``HOST_CALLS`` calls."""
    import torch

    call(small)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(HOST_CALLS):
            call(small)
        seconds.append((perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return median(seconds)


def row(
    name: str, form: str, size: int, seconds: list[float], copy: float | None, host: float
) -> Row:
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
        host * 1e6,
    )


def measure(
    code: Compressor,
    form: str,
    dtype: torch.dtype,
    elements: int,
    ranks: Sequence[int],
    copy: float,
    label: str = "",
) -> list[Row]:
    """Time each operation of ``code`` on tensors of ``elements`` elements, into given ones.

    Sums are of ``ranks`` payloads of as many elements each.
    """
    import torch

    device = torch.device("cuda")
    size = code.payload_bytes(elements)
    few = code.payload_bytes(SMALL)
    raw = dtype.itemsize * elements
    value_room = torch.empty(elements, device=device, dtype=dtype)
    byte_room = torch.empty(size, device=device, dtype=torch.uint8)
    rows: list[Row] = []

    def add(
        name: str,
        moved: int,
        call: Callable[[Tensor, int], object],
        inputs: Sequence[Tensor],
        small: Tensor,
    ) -> None:
        seconds = time_calls(lambda x: call(x, elements), inputs)
        host = host_time(lambda x: call(x, SMALL), small)
        rows.append(row(label + name, form, moved, seconds, copy, host))

    def encode(x: Tensor, numel: int) -> object:
        out = byte_room[: size if numel == elements else few]
        return code.encode_rows(x, out.unsqueeze(0))

    def decode(p: Tensor, numel: int) -> object:
        return code.decode_rows(p, numel, dtype, value_room[:numel].unsqueeze(0))

    def reduce_encode(p: Tensor, numel: int) -> object:
        return code.reduce_encode(p, numel, byte_room[: size if numel == elements else few])

    def decode_sum(p: Tensor, numel: int) -> object:
        return code.decode_sum(p, numel, value_room[:numel])

    values = [torch.randn(1, elements, device=device, dtype=dtype) for _ in range(INPUT_SETS)]
    small = torch.randn(max(ranks), SMALL, device=device, dtype=dtype)
    add("encode", raw + size, encode, values, small[:1])
    payloads = [code.encode_rows(x) for x in values]
    few_payloads = code.encode_rows(small)
    add("decode", raw + size, decode, payloads, few_payloads[:1])
    del payloads
    for count in ranks:
        stacks = [
            torch.cat([code.encode_rows(values[(k + j) % INPUT_SETS]) for k in range(count)])
            for j in range(2)
        ]
        few_stack = few_payloads[:count]
        add(f"reduce_encode of {count}", (count + 1) * size, reduce_encode, stacks, few_stack)
        add(f"decode_sum of {count}", count * size + raw, decode_sum, stacks, few_stack)
        del stacks
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| call | format | µs | GB/s | 10% .. 90% | share of copy | host µs |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.name} | {r.format} | {r.microseconds:.1f} | {r.gigabytes_per_second:.0f} | "
            f"{r.low:.0f} .. {r.high:.0f} | {r.share:.1%} | {r.host_microseconds:.1f} |"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; see :func:`megatron_taco.cli.bench.run` for the result."""
    import torch

    from megatron_taco.compressors import Taco, build
    from megatron_taco.config.data_parallel import SDP4BIT_GRADIENTS, SDP4BIT_WEIGHTS

    if not torch.cuda.is_available() or not Taco().has_kernels(torch.device("cuda", 0)):
        print(
            "megatron-taco bench kernels: the kernels need a CUDA device of compute capability 8.0 "
            "or newer and Triton; none was found",
            file=sys.stderr,
        )
        return 2

    import triton

    ranks = [int(count) for count in args.ranks]
    bf16 = torch.bfloat16
    sources = [torch.randn(args.elements, device="cuda", dtype=bf16) for _ in range(INPUT_SETS)]
    target = torch.empty_like(sources[0])
    few = target[:SMALL]
    host = host_time(few.copy_, sources[0][:SMALL])
    rows = [row("copy", "-", 4 * args.elements, time_calls(target.copy_, sources), None, host)]
    copy = rows[0].gigabytes_per_second
    del sources, target
    for form in args.formats:
        taco = Taco(form, args.block, "hadamard", args.scales)
        rows += measure(taco, form, bf16, args.elements, ranks, copy)
        torch.cuda.empty_cache()
    form = args.formats[0]
    unrotated = Taco(form, args.block, "none", args.scales)
    rows += measure(unrotated, form, bf16, args.elements, ranks[:1], copy, "no rotation: ")
    plain = Taco(form, args.block, "hadamard", args.scales).reference()
    fraction = max(args.elements // FRACTION, 1)
    slow = f"plain torch, 1/{FRACTION} the size: "
    rows += measure(plain, form, bf16, fraction, ranks[:1], copy, slow)
    for what, settings in (("gradients", SDP4BIT_GRADIENTS), ("weights", SDP4BIT_WEIGHTS)):
        code = build("block_integer", **settings)
        rows += measure(code, "sdp4bit", torch.float32, args.elements, ranks[:1], copy, f"{what}: ")
        torch.cuda.empty_cache()
    facts = {
        "benchmark": "kernels",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "elements": args.elements,
        "block": args.block,
        "scales": args.scales,
        "calls_a_graph": CALLS,
        "replays": REPLAYS,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(table(rows))
    report = {**facts, "rows": [asdict(r) for r in rows]}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from megatron_taco.lab import plots

        plots.draw(report, args.plot)
    return 0
