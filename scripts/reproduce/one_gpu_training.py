"""GPT-350M on one GPU with TACO and without: losses, bytes, times.

Two (TP 2) and four (TP 2 × PP 2) NCCL ranks share the card, real text (the Python standard
library's sources as bytes), the model and optimiser of configs/gpt-350m.yaml. Prints a Markdown
report.

    python scripts/reproduce/one_gpu_training.py --steps 50 --out results.md
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_taco.compressors.dispatch import kernels_on
from megatron_taco.config import load
from megatron_taco.lab.shared_gpu import run_ranks
from megatron_taco.training.run_folder import environment

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "gpt-350m.yaml"
OFF = "compression.tensor_parallel.mode=off"


def train(name: str, ranks: int, runs: Path, overrides: list[str]) -> tuple[float, list[Any]]:
    """Run the trainer; returns its wall time in seconds and its metrics."""
    start = time.perf_counter()
    code = run_ranks(
        ranks,
        [
            *("-m", "megatron_taco.pretrain", "--config", str(CONFIG)),
            *("data.path=null", "data.split=null", "data.source=python-stdlib"),
            *("data.tokenizer=bytes", f"data.cache={runs / 'data'}"),
            *(f"run.dir={runs}", f"run.name={name}", *overrides),
        ],
        timeout_s=500,
    )
    if code:
        logs = sorted((runs / name / "logs").glob("*.log"))
        for log in logs:
            print(f"--- {log}\n{log.read_text()[-3000:]}", file=sys.stderr)
        sys.exit(f"{name} failed with exit code {code}")
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return time.perf_counter() - start, [json.loads(line) for line in lines]


def report(layout: str, off: list[Any], on: list[Any]) -> list[str]:
    """Lines of Markdown for one layout."""
    steps = {
        label: [line for line in lines if line["event"] == "step"]
        for label, lines in (("off", off), ("on", on))
    }
    validation = {
        label: [line["loss"] for line in lines if line["event"] == "validation"][-1]
        for label, lines in (("off", off), ("on", on))
    }
    ms = {label: [s["step_ms"] for s in lines[5:]] for label, lines in steps.items()}
    tail = {
        label: statistics.mean(s["loss"] for s in lines[-10:]) for label, lines in steps.items()
    }
    rows = [
        ("loss, mean of last 10 steps", tail, "{:.4f}"),
        ("validation loss", validation, "{:.4f}"),
        ("ms a step, median", {k: statistics.median(v) for k, v in ms.items()}, "{:.0f}"),
        (
            "ms a step, 10th and 90th percentile",
            {k: statistics.quantiles(v, n=10) for k, v in ms.items()},
            None,
        ),
    ]
    lines = [f"### {layout}", "", "| | uncompressed | TACO | change |", "|---|---|---|---|"]
    for name, values, form in rows:
        if form is None:
            cells = [f"{values[k][0]:.0f}, {values[k][-1]:.0f}" for k in ("off", "on")]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} | |")
        else:
            a, b = values["off"], values["on"]
            lines.append(f"| {name} | {form.format(a)} | {form.format(b)} | {b / a - 1:+.2%} |")
    finite = all(s["loss"] == s["loss"] for s in steps["on"])
    end = next(line for line in on if line["event"] == "end")
    lines += ["", f"{len(steps['on'])} steps; every loss finite: {finite}.", ""]
    lines += ["| role | calls | compressed | raw MiB | wire MiB | wire/raw | error | non-finite |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for flow, f in end["flows"].items():
        error = "-" if f["error"] is None else f"{f['error']:.2%}"
        raw, wire = f["raw_bytes"] / 2**20, f["wire_bytes"] / 2**20
        lines.append(
            f"| {flow} | {f['calls']} | {f['compressed']} | {raw:.0f} | {wire:.0f} | "
            f"{wire / raw:.3f} | {error} | {f['nonfinite_blocks']} |"
        )
    return [*lines, ""]


def main() -> None:
    """Run both layouts, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layouts", default="tp2,tp2pp2")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=Path("runs/one-gpu"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common = [
        "megatron.tensor_model_parallel_size=2",
        f"megatron.micro_batch_size={args.micro_batch}",
        f"megatron.global_batch_size={args.global_batch}",
        f"megatron.train_iters={args.steps}",
        *("megatron.log_interval=1", "megatron.eval_iters=5", "megatron.eval_interval=null"),
        # The recipe's warm-up is 700 steps; a short run has to learn something.
        *("megatron.lr_warmup_fraction=null", "megatron.lr_warmup_iters=10"),
        *("megatron.use_distributed_optimizer=false", "compression.tensor_parallel.min_bytes=1MiB"),
    ]
    layouts = {
        "tp2": ("TP 2, two NCCL ranks", 2, []),
        "tp2pp2": (
            "TP 2 × PP 2, four NCCL ranks",
            4,
            ["megatron.pipeline_model_parallel_size=2"],
        ),
    }
    found = environment()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    settings = load(CONFIG).compression.tensor_parallel
    fused = kernels_on(torch.device("cuda", 0), settings.scales) is not None
    compressor = "Fused kernels" if fused else "Plain-torch compressor"
    lines = [
        "## GPT-350M on one GPU, ranks sharing it",
        "",
        f"{found['gpus']}, driver {driver.stdout.strip()}, torch {torch.__version__}, "
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "
        f"megatron-core {found['versions']['megatron-core']}, Python {platform.python_version()}. "
        "Link: NCCL sockets over loopback (NCCL_HOSTID differs between ranks). Local layer spec, "
        f"torch attention, BF16, sequence 2048, micro-batch {args.micro_batch}, global batch "
        f"{args.global_batch}. {compressor}: "
        "times are those of the ranks sharing one card.",
        "",
    ]
    for key in args.layouts.split(","):
        title, ranks, overrides = layouts[key]
        seconds_off, off = train(f"{key}-off", ranks, args.runs, [*common, *overrides, OFF])
        seconds_on, on = train(f"{key}-on", ranks, args.runs, [*common, *overrides])
        lines += report(title, off, on)
        lines += [f"Wall time with start-up: {seconds_off:.0f} s and {seconds_on:.0f} s.", ""]
        if args.out:
            args.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
