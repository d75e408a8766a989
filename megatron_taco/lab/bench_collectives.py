"""``megatron-taco bench collectives``: compressed collectives beside the backend's own.

On ranks (of torchrun or ``lab run``) it measures; elsewhere it starts its own ranks, on the hosts
or the loopback that its arguments ask for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from megatron_taco.cli.lab_arguments import checked, count, microseconds, words
from megatron_taco.lab.bench_where import add_where_arguments, on_ranks, start
from megatron_taco.lab.link import LabError
from megatron_taco.lab.plot_file import plot_file
from megatron_taco.lab.sizes import parse_sizes

FORMATS: Final = ("e4m3", "e5m2", "int8", "int6", "int4")
OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS: Final = ("one_shot", "two_shot", "hierarchical")
ROTATIONS: Final = ("hadamard", "none")
SCALES: Final = ("dual", "merged_fp32", "merged_bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``bench collectives``."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--sizes",
        type=checked(parse_sizes),
        metavar="LIST",
        help="bytes of the BF16 tensor (default: 1MiB,16MiB,128MiB on GPUs, 1MiB,4MiB on CPUs)",
    )
    for name, allowed, default in (
        ("formats", FORMATS, "e4m3,int8,int6,int4"),
        ("operations", OPERATIONS, ",".join(OPERATIONS)),
        ("scales", SCALES, "dual"),
    ):
        what.add_argument(
            f"--{name}",
            type=words(allowed),
            default=default,
            metavar="LIST",
            help=f"of {', '.join(allowed)} (default: {default})",
        )
    what.add_argument(
        "--rotation",
        type=words(ROTATIONS),
        default=",".join(ROTATIONS),
        metavar="LIST",
        help=f"of {', '.join(ROTATIONS)}; if both, integer formats are rotated only (default: "
        "both: block-scaled FP8 without rotation is the usual alternative)",
    )
    what.add_argument(
        "--algorithms",
        type=words(ALGORITHMS),
        metavar="LIST",
        help=f"of {', '.join(ALGORITHMS)} (default: all that the ranks' nodes allow)",
    )
    what.add_argument(
        "--chunks", type=count, metavar="N", help="of each message (default: by its size)"
    )
    what.add_argument("--block", type=count, default=256, choices=(32, 64, 128, 256, 512))
    what.add_argument("--repeats", type=count, default=5, metavar="N", help="default: 5")
    what.add_argument(
        "--silence",
        type=microseconds,
        default=microseconds("50ms"),
        metavar="TIME",
        help="without traffic before each call, so that the link's bucket is full (default: 50ms)",
    )
    what.add_argument("--json", type=Path, metavar="FILE", help="also write all samples there")
    what.add_argument("--plot", type=plot_file, metavar="FILE", help="draw a .png or .svg")
    add_where_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; see :func:`megatron_taco.cli.bench.run` for the result."""
    try:
        if on_ranks():
            from megatron_taco.lab.collective_runs import measure

            return measure(args)
        return _start(args)
    except LabError as error:
        print(f"megatron-taco bench collectives: {error}", file=sys.stderr)
        return 2


def _start(args: argparse.Namespace) -> int:
    """Starts ranks that run this benchmark."""
    command = [sys.executable, "-m", "megatron_taco.cli", "bench", "collectives"]
    for name in ("formats", "operations", "scales", "rotation", "algorithms"):
        if getattr(args, name) is not None:
            command += [f"--{name}", ",".join(getattr(args, name))]
    command += ["--block", str(args.block)]
    if args.chunks is not None:
        command += ["--chunks", str(args.chunks)]
    command += ["--repeats", str(args.repeats), "--silence", f"{args.silence}us"]
    if args.sizes is not None:
        command += ["--sizes", ",".join(map(str, args.sizes))]
    for name in ("json", "plot"):
        if getattr(args, name) is not None:
            command += [f"--{name}", str(getattr(args, name))]
    return start(args, command)
