"""Losses of whole runs on one GPU, uncompressed and compressed; bytes and times beside them.

Two (TP 2) and four (TP 2 × PP 2) NCCL ranks share the card, real text (the Python standard
library's sources as bytes), the optimiser of configs/gpt-350m.yaml. Prints a Markdown report.

    python scripts/reproduce/one_gpu_training.py --steps 50 --out results.md
    python scripts/reproduce/one_gpu_training.py --model small --steps 200 --layouts tp2 \
        --formats e4m3,int8,int6,int4 --at-once 5 --json losses.json
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_taco.cli.lab_arguments import words
from megatron_taco.compressors import Taco
from megatron_taco.config import load
from megatron_taco.lab import loss_report
from megatron_taco.lab.bench_collectives import FORMATS
from megatron_taco.lab.loss_report import UNCOMPRESSED
from megatron_taco.lab.markdown import markdown_table
from megatron_taco.training.run_folder import published_environment

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "gpt-350m.yaml"
COMPRESSION = "compression.tensor_parallel"
TIMEOUT_S = 550

MODELS: dict[str, list[str]] = {
    "gpt-350m": [
        "megatron.micro_batch_size=4",
        "megatron.global_batch_size=8",
        "megatron.lr_warmup_iters=10",
        "megatron.eval_iters=5",
    ],
    "small": [
        "model.num_layers=4",
        "model.hidden_size=512",
        "model.num_attention_heads=8",
        "model.max_position_embeddings=512",
        "model.vocab_size=null",
        "megatron.seq_length=512",
        "megatron.micro_batch_size=16",
        "megatron.global_batch_size=16",
        "megatron.lr_warmup_iters=20",
        "megatron.lr_decay_iters=null",  # as long as the run
        "megatron.eval_iters=10",
    ],
}
LAYOUTS = {
    "tp2": ("TP 2, two NCCL ranks", 2, []),
    "tp2pp2": (
        "TP 2 × PP 2, four NCCL ranks",
        4,
        ["megatron.pipeline_model_parallel_size=2"],
    ),
}


class Runs:
    """Trains the runs of a report, some of them at once."""

    def __init__(self, folder: Path, at_once: int, common: list[str]) -> None:
        self.folder = folder
        self.at_once = at_once
        self.common = common

    def train(self, layout: str, arms: list[str]) -> dict[str, dict[str, Any]]:
        """Train one layout uncompressed and by each format; returns the records by arm."""
        records: dict[str, dict[str, Any]] = {}
        waiting = list(arms)
        running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    arm = waiting.pop(0)
                    running[arm] = (self._start(layout, arm), time.perf_counter())
                for arm, (process, start) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[arm]
                    if code:
                        self._fail(f"{layout}-{arm}", code)
                    lines = (self.folder / f"{layout}-{arm}" / "metrics.jsonl").read_text()
                    records[arm] = loss_report.run_record(
                        [json.loads(line) for line in lines.splitlines()],
                        time.perf_counter() - start,
                    )
                time.sleep(0.2)
        finally:
            for process, _ in running.values():
                process.terminate()  # the launcher ends its ranks
        return {arm: records[arm] for arm in arms}

    def _start(self, layout: str, arm: str) -> subprocess.Popen[bytes]:
        _, ranks, overrides = LAYOUTS[layout]
        mode = ["mode=off"] if arm == UNCOMPRESSED else ["mode=on", f"format={arm}"]
        print(f"training: {layout}, {arm}", file=sys.stderr, flush=True)
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron_taco.lab.shared_gpu", "--ranks", str(ranks)),
                *("--timeout", str(TIMEOUT_S), "--"),
                *("-m", "megatron_taco.pretrain", "--config", str(CONFIG)),
                *("data.path=null", "data.split=null", "data.source=python-stdlib"),
                *("data.tokenizer=bytes", f"data.cache={self.folder / 'data'}"),
                *(f"run.dir={self.folder}", f"run.name={layout}-{arm}"),
                *self.common,
                *overrides,
                *(f"{COMPRESSION}.{setting}" for setting in mode),
            ],
            stdout=subprocess.DEVNULL,  # what it prints is in the run folder's metrics as well
        )

    def _fail(self, name: str, code: int) -> None:
        for log in sorted((self.folder / name / "logs").glob("*.log")):
            print(f"--- {log}\n{log.read_text()[-3000:]}", file=sys.stderr)
        sys.exit(f"{name} failed with exit code {code}")


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    about = report["about"]
    lines = [f"## {about['model']} on one GPU, ranks sharing it", "", about["text"], ""]
    for layout in report["layouts"].values():
        lines += [f"### {layout['title']}", ""]
        runs = layout["runs"]
        lines += markdown_table(*loss_report.table(runs, times=about["at_once"] == 1))
        for name, run in runs.items():
            if name != UNCOMPRESSED:
                lines += [
                    "",
                    f"What {name} sent:",
                    "",
                    *markdown_table(*loss_report.flow_table(run)),
                ]
        seconds = ", ".join(f"{run['seconds']:.0f}" for run in runs.values())
        lines += ["", f"Wall time with start-up: {seconds} s.", ""]
    return "\n".join(lines)


def about(args: argparse.Namespace, common: list[str]) -> dict[str, Any]:
    """What was run where."""
    found = published_environment()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    config = load(CONFIG, common)
    scales = config.compression.tensor_parallel.scales
    device = torch.device("cuda", 0)
    fused = [f for f in args.formats if Taco(f, scales=scales).has_kernels(device)]
    plain = [f for f in args.formats if f not in fused]
    compressors = [f"fused kernels for {', '.join(fused)}"] if fused else []
    compressors += [f"the plain-torch compressor for {', '.join(plain)}"] if plain else []
    sizes = config.model
    at_once = f"{args.at_once} runs at once" if args.at_once > 1 else "one run after the other"
    return {
        "model": args.model,
        "steps": args.steps,
        "at_once": args.at_once,
        "overrides": common,
        "environment": found,
        "text": f"{', '.join(found['gpus'])}, driver {driver.stdout.strip()}, torch "
        f"{torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, megatron-core "
        f"{found['versions']['megatron-core']}, Python {platform.python_version()}. Link: NCCL "
        "sockets over loopback (NCCL_HOSTID differs between ranks). Local layer spec, torch "
        f"attention, BF16, {sizes.num_layers} layers, hidden {sizes.hidden_size}, sequence "
        f"{config.megatron.get('seq_length') or sizes.max_position_embeddings}, micro-batch "
        f"{config.megatron['micro_batch_size']}, global batch "
        f"{config.megatron['global_batch_size']}, {args.steps} steps; {' and '.join(compressors)}, "
        f"scales {scales}; {at_once}. Ranks share the card: times are not those of a card each.",
    }


def main() -> None:
    """Train all runs of all layouts, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt-350m")
    parser.add_argument("--formats", type=words(FORMATS), default="e4m3", metavar="LIST")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layouts", type=words(tuple(LAYOUTS)), default="tp2,tp2pp2")
    parser.add_argument("--micro-batch", type=int, help="default: the model's")
    parser.add_argument("--global-batch", type=int, help="default: the model's")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the card")
    parser.add_argument("--runs", type=Path, default=Path("runs/one-gpu"))
    parser.add_argument("--out", type=Path, help="also write the Markdown there")
    parser.add_argument("--json", type=Path, help="also write every loss there")
    args = parser.parse_args()
    common = [
        *MODELS[args.model],
        "megatron.tensor_model_parallel_size=2",
        f"megatron.train_iters={args.steps}",
        *("megatron.log_interval=1", "megatron.eval_interval=null"),
        # The recipe's warm-up is 700 steps; a short run has to learn something.
        "megatron.lr_warmup_fraction=null",
        *("megatron.use_distributed_optimizer=false", f"{COMPRESSION}.min_bytes=1MiB"),
    ]
    for key in ("micro_batch", "global_batch"):
        if getattr(args, key) is not None:
            common.append(f"megatron.{key}_size={getattr(args, key)}")
    runs = Runs(args.runs, args.at_once, common)
    report: dict[str, Any] = {
        "benchmark": "losses",
        "about": about(args, common),
        "layouts": {},
    }
    for key in args.layouts:
        records = runs.train(key, [UNCOMPRESSED, *args.formats])
        report["layouts"][key] = {"title": LAYOUTS[key][0], "runs": records}
        if args.json:
            args.json.write_text(json.dumps(report) + "\n")
        if args.out:
            args.out.write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
