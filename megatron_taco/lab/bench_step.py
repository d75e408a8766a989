"""``megatron-taco bench step``: training steps, compressed and not, in one run of the trainer.

The ranks train, and the arms take turns: plain, compressed ones, and silent, in which nothing (or
next to nothing, see ``step_pipeline``) is sent on the axis in question. So every ratio is of
neighbouring steps on the same processes, link and memory, and the silent arm gives the share of
communication that the limit follows from. Losses are compared by
scripts/reproduce/one_gpu_training.py: here nothing is learned.

On ranks (of torchrun or ``lab run``) it measures; elsewhere it starts its own ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from megatron_taco.cli.lab_arguments import count, gpu_mode, words
from megatron_taco.lab.bench_collectives import FORMATS, SCALES
from megatron_taco.lab.bench_where import add_where_arguments, on_ranks, start
from megatron_taco.lab.link import LabError
from megatron_taco.lab.plot_file import plot_file
from megatron_taco.lab.step_arms import AXES, BOUNDARIES, COMPRESSORS, TENSOR
from megatron_taco.lab.step_config import UNCOMPRESSED
from megatron_taco.lab.step_schedule import AUTO, FP32

ARMS: Final = (*FORMATS, AUTO, FP32)
_LISTS: Final = ("formats", "boundaries", "compressors")
_SDPA = "sdpa"
_TE = "transformer_engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``bench step``."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--axis",
        choices=AXES,
        default=TENSOR,
        help="the parallel axis whose messages are compressed; all: all that have several ranks, "
        "together and each alone (default: tensor)",
    )
    what.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration of the trainer (default: on GPUs the reference model, 8 layers of "
        "hidden size 2048, for --axis data GPT-350M; a tiny one on CPUs; the axis over all ranks)",
    )
    what.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of the configuration, e.g. megatron.micro_batch_size=1",
    )
    what.add_argument(
        "--formats",
        type=words(ARMS),
        default="e4m3,int8,int6,int4",
        metavar="LIST",
        help=f"tensor axis: of {', '.join(ARMS)} (default: e4m3,int8,int6,int4); auto compresses "
        "the messages that its policy chooses, with the first of the others or e4m3; fp32 sends "
        "uncompressed FP32 messages of the BF16 run, with --axis all as an arm of its own",
    )
    what.add_argument(
        "--boundaries",
        type=words(BOUNDARIES),
        default="mapl,mapl+int8",
        metavar="LIST",
        help=f"pipeline: of {', '.join(BOUNDARIES)}; after the + what quantises both directions, "
        "with rvq the gradients by int8; of rank hidden size / 8 unless the configuration has one "
        "(default: mapl,mapl+int8)",
    )
    what.add_argument(
        "--compressors",
        type=words(COMPRESSORS),
        default="sdp4bit,e4m3,block_int8,block_int4",
        metavar="LIST",
        help=f"data parallelism: of {', '.join(COMPRESSORS)}; e4m3 and the like are TACO's formats "
        "for gradients and weights, methods with memory are for gradients, beside the "
        "configuration's compressor of weights (default: sdp4bit,e4m3,block_int8,block_int4)",
    )
    what.add_argument(
        "--block",
        type=count,
        default=256,
        choices=(32, 64, 128, 256, 512),
        help="of the tensor axis (default: 256)",
    )
    what.add_argument(
        "--scales", default="dual", choices=SCALES, help="of the tensor axis (default: dual)"
    )
    what.add_argument(
        "--uncompressed",
        type=words(tuple(UNCOMPRESSED)),
        metavar="LIST",
        help=f"uncompressed configurations, of {', '.join(UNCOMPRESSED)}; sdpa, with which "
        "compression runs, is always measured, the others in runs of their own before it "
        "(default: transformer_engine where it is installed)",
    )
    what.add_argument("--cycles", type=count, default=4, metavar="N", help="default: 4")
    what.add_argument(
        "--steps", type=count, default=2, metavar="N", help="of an arm in a cycle (default: 2)"
    )
    what.add_argument(
        "--settle",
        type=int,
        choices=range(10),
        default=1,
        metavar="N",
        help="steps after a change of arm that do not count (default: 1)",
    )
    what.add_argument("--json", type=Path, metavar="FILE", help="also write all samples there")
    what.add_argument("--plot", type=plot_file, metavar="FILE", help="draw a .png or .svg")
    # How this program calls itself: another uncompressed configuration alone, and its result.
    what.add_argument("--only", choices=tuple(UNCOMPRESSED), help=argparse.SUPPRESS)
    what.add_argument("--other", nargs=2, action="append", help=argparse.SUPPRESS)
    add_where_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; see :func:`megatron_taco.cli.bench.run` for the result."""
    try:
        if on_ranks():
            if args.uncompressed is not None and args.uncompressed != [_SDPA]:
                raise LabError(
                    "--uncompressed needs a run for each: start this without torchrun or lab run, "
                    "with --ranks N, --hosts N --rate RATE or --lab NAME"
                )
            from megatron_taco.lab.step_runs import measure

            return measure(args)
        return _start(args)
    except LabError as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks find the same mistake
            print(f"megatron-taco bench step: {error}", file=sys.stderr)
        return 2


def _start(args: argparse.Namespace) -> int:
    """Starts ranks that run this benchmark, once for each uncompressed configuration."""
    command = [sys.executable, "-m", "megatron_taco.cli", "bench", "step", *args.overrides]
    command += ["--axis", args.axis]
    if args.config is not None:
        command += ["--config", str(args.config)]
    for name in ("block", "scales", "cycles", "steps", "settle"):
        command += [f"--{name}", str(getattr(args, name))]
    main = [*command]
    for name in _LISTS:
        main += [f"--{name}", ",".join(getattr(args, name))]
    for name in ("json", "plot"):
        if getattr(args, name) is not None:
            main += [f"--{name}", str(getattr(args, name))]
    with tempfile.TemporaryDirectory(prefix="megatron-taco-bench-step-") as folder:
        for name in _others(args):
            file = Path(folder) / f"{name}.json"
            print(f"bench step: uncompressed, {name}", file=sys.stderr, flush=True)
            code = start(args, [*command, "--only", name, "--json", str(file)])
            if code:
                return code
            main += ["--other", name, str(file)]
        return start(args, main)


def _others(args: argparse.Namespace) -> list[str]:
    if args.uncompressed is not None:
        return [name for name in args.uncompressed if name != _SDPA]
    # On CPUs the trainer does not run with Transformer Engine.
    installed = importlib.util.find_spec(_TE) is not None and gpu_mode(args) != "none"
    return [_TE] if installed else []
