"""Losses of whole runs with compression on several parallel axes beside those without.

    python scripts/reproduce/axes_losses.py --ranks 8 --steps 500 --arms all --json losses.json \
        megatron.tensor_model_parallel_size=2 megatron.pipeline_model_parallel_size=2

The model is GPT-350M by the optimiser of configs/gpt-350m.yaml, the text the Python standard
library's sources as bytes. Each run is the trainer's own, a rank a GPU; ``--share-gpu`` puts all
ranks on one, ``--cpu`` uses none. Further words are overrides of the configuration. Stopped between
two runs, the same command goes on with the second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from megatron_taco.cli.lab_arguments import add_gpu_arguments, count, words
from megatron_taco.lab import loss_report, part_run
from megatron_taco.lab.loss_report import UNCOMPRESSED
from megatron_taco.lab.signals import Caught

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "gpt-350m.yaml"
TEXT = (
    *("data.path=null", "data.split=null", "data.source=python-stdlib", "data.tokenizer=bytes"),
    "model.vocab_size=null",
)
SECTION = "compression"
ON = {
    "tensor": (f"{SECTION}.tensor_parallel.mode=on",),
    "pipeline": (
        f"{SECTION}.pipeline_parallel.mode=on",
        f"{SECTION}.pipeline_parallel.boundary=int8_hadamard",
    ),
    "data": (
        f"{SECTION}.data_parallel.mode=on",
        f"{SECTION}.data_parallel.gradients={{compressor: sdp4bit}}",
        f"{SECTION}.data_parallel.weights={{compressor: sdp4bit}}",
    ),
}
ARMS = (*ON, "all")
TOLD = "TACO E4M3 (tensor), 8-bit Hadamard (pipeline), SDP4Bit gradients and weights (data)"


def compression(arm: str, axes: tuple[str, ...]) -> list[str]:
    """Overrides that put compression on the axes of an arm, and nowhere else."""
    off = [f"{SECTION}.{axis}_parallel.mode=off" for axis in ON]
    chosen = axes if arm == "all" else (arm,) if arm in axes else ()
    return [*off, *(override for axis in chosen for override in ON[axis])]


def axes_of(ranks: int, overrides: list[str]) -> tuple[str, ...]:
    """The axes with more than one rank."""
    sizes = dict(text.partition("=")[::2] for text in overrides)
    tensor = int(sizes.get("megatron.tensor_model_parallel_size", "4"))  # as in the file
    pipeline = int(sizes.get("megatron.pipeline_model_parallel_size", "1"))
    if ranks % (tensor * pipeline):
        sys.exit(f"--ranks {ranks} is no multiple of tensor {tensor} x pipeline {pipeline}")
    found = {"tensor": tensor, "pipeline": pipeline, "data": ranks // (tensor * pipeline)}
    return tuple(axis for axis, size in found.items() if size > 1)


class Runs:
    """Trains one arm after the other; what is complete is kept until all are."""

    def __init__(self, args: argparse.Namespace, axes: tuple[str, ...]) -> None:
        self._args = args
        self._axes = axes
        told = json.dumps([args.ranks, args.steps, args.cpu, args.share_gpu, *args.overrides])
        self._folder: Path = args.runs / hashlib.sha256(told.encode()).hexdigest()[:12]

    def train(self, arm: str) -> dict[str, Any]:
        """Run the trainer, unless this was done; returns what the report keeps of it."""
        kept = self._folder / f"{arm}.json"
        if kept.exists():
            print(f"there already: {arm}", file=sys.stderr, flush=True)
            return dict(json.loads(kept.read_text(encoding="utf-8")))
        print(f"training: {arm}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        # What it prints is in the run folder's metrics as well. The launcher ends its ranks.
        with Caught() as caught:
            code, wrong = part_run.run(
                self._command(arm), {}, caught=caught, timeout_s=math.inf, quiet=True
            )
        run = self._folder / arm
        if caught.exit_code is not None:
            sys.exit(caught.exit_code)
        if code:
            for log in sorted((run / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            sys.exit(f"the run {arm}: {wrong}")
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found = loss_report.run_record(
            [json.loads(line) for line in lines], time.perf_counter() - start
        )
        found["environment"] = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        del found["environment"]["argv"]  # names folders of this machine
        found["config"] = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        partial = kept.with_suffix(".partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(kept)
        return found

    def forget(self) -> None:
        """Remove what was kept."""
        shutil.rmtree(self._folder)

    def _command(self, arm: str) -> list[str]:
        args = self._args
        gpus = ["--share-gpu"] if args.share_gpu else ["--cpu"] if args.cpu else []
        return [
            *("-m", "megatron_taco.cli", "lab", "run", "--ranks", str(args.ranks)),
            *(*gpus, "--", "-m", "megatron_taco.pretrain", "--config", str(CONFIG)),
            *(*TEXT, f"data.cache={ROOT / '.cache' / 'data'}"),
            *(f"run.dir={self._folder}", f"run.name={arm}"),
            *(f"megatron.train_iters={args.steps}", "megatron.log_interval=1"),
            *("megatron.eval_interval=null", "megatron.eval_iters=5"),
            # The recipe's warm-up is 700 steps; a short run has to learn something.
            *("megatron.lr_warmup_fraction=null", f"megatron.lr_warmup_iters={args.steps // 10}"),
            f"megatron.lr_decay_iters={args.steps}",
            *args.overrides,
            *compression(arm, self._axes),
        ]


def about(args: argparse.Namespace, run: dict[str, Any], arms: list[str]) -> dict[str, Any]:
    """What was run, from what the uncompressed run left."""
    found, model, megatron = run["environment"], run["config"]["model"], run["config"]["megatron"]
    where = ", ".join(dict.fromkeys(found["gpus"])) or "CPU, gloo"
    length = megatron.get("seq_length") or model["max_position_embeddings"]
    return {
        "model": "gpt-350m",
        "steps": args.steps,
        "at_once": 1,
        "bytes": True,
        "overrides": args.overrides,
        "environment": found,
        "text": f"{args.ranks} ranks, {where}, torch {found['versions']['torch']}, megatron-core "
        f"{found['versions']['megatron-core']}, Python {found['python']}. BF16, "
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, sequence {length}, "
        f"micro-batch {megatron['micro_batch_size']}, global batch "
        f"{megatron['global_batch_size']}, {args.steps} steps on the Python standard library's "
        f"sources as bytes; one seed. Arms: {', '.join(arms)}; {TOLD}.",
    }


def main() -> None:
    """Train all arms and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args()
    axes = axes_of(args.ranks, args.overrides)
    if missing := [arm for arm in args.arms if arm != "all" and arm not in axes]:
        parser.error(f"--arms {missing[0]}: that axis has one rank; there are: {', '.join(axes)}")
    runs = Runs(args, axes)
    records = {arm: runs.train(arm) for arm in (UNCOMPRESSED, *args.arms)}
    report = {
        "benchmark": "losses",
        "about": about(args, records[UNCOMPRESSED], list(args.arms)),
        "layouts": {"only": {"title": "", "runs": records}},
    }
    for record in records.values():
        del record["environment"], record["config"]
    if args.json:
        args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    else:
        head, rows = loss_report.table(records, times=True)
        print("\n".join(" | ".join(row) for row in [head, *rows]))
    runs.forget()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this program's arguments."""
    parser.add_argument("--ranks", type=count, required=True, metavar="N")
    parser.add_argument("--steps", type=count, default=500, metavar="N")
    parser.add_argument("--arms", type=words(ARMS), default="all", metavar="LIST")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / "runs" / "axes-losses",
        help="folder of the runs; a complete one is not run again until all are",
    )
    parser.add_argument("--json", type=Path, help="write every loss there")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    add_gpu_arguments(parser)


if __name__ == "__main__":
    main()
