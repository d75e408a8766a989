"""What chunks of the forward pass save, and what hides behind compute.

Two NCCL ranks (TP 2) train a GPT of 4 layers, hidden size 2048. The steps of one run take turns
between no compression, compression, and compression with the forward pass in 2 and 4 chunks, so
that all see the same machine. Then one step of each is traced. Prints Markdown.

    python scripts/reproduce/forward_overlap.py --runs RUNS [--rate 10Gbit | --own-gpus]
        [--sequence-parallel] [--connections 8] [key=value ...]

The ranks share one GPU and talk over loopback, or with --rate over an emulated link (root needed).
With --own-gpus they take two GPUs and the link between them: NVLink, or host memory with
NCCL_P2P_DISABLE=1. --connections sets CUDA_DEVICE_MAX_CONNECTIONS to something else than 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ARMS = {"compressed": 1, "2-chunks": 2, "4-chunks": 4, "uncompressed": None}
"""What the steps take turns between: forward_chunks, None without compression."""
WARM_UP = 2
"""Rounds of all arms before those that count."""
CONFIG = """
run: {name: run, dir: %s}
data: {source: mock, tokenizer: {null: 8192}}
model:
  num_layers: 4
  hidden_size: 2048
  num_attention_heads: 16
  max_position_embeddings: 2048
  position_embedding_type: rope
  normalization: RMSNorm
  swiglu: true
  add_bias_linear: false
megatron:
  tensor_model_parallel_size: 2
  micro_batch_size: 2
  global_batch_size: 2
  lr: 1.0e-4
  lr_decay_style: constant
  lr_decay_iters: 1000
  eval_iters: 0
  log_interval: 1
  bf16: true
  attention_dropout: 0.0
  hidden_dropout: 0.0
compression:
  tensor_parallel: {mode: on, forward_chunks: 2}
telemetry: {error_every: 0}
"""


def worker(config: str, folder: Path, rounds: int, overrides: list[str]) -> int:
    """Train as one rank; the step's number says which arm it belongs to."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections not in (None, "1"):
        import torch

        torch.zeros(1, device="cuda")  # CUDA has read the variable; Megatron only wants to see 1
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    import torch

    from megatron_taco.patching.overlap import ForwardOverlap
    from megatron_taco.patching.session import Session
    from megatron_taco.training.run import run

    overlaps: list[Any] = []
    profilers: list[Any] = []
    create, begin, finish = ForwardOverlap.__init__, Session._begin_step, Session.finish

    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        overlaps.append(self)

    def end_profile() -> None:
        for name, profiler in profilers:
            torch.cuda.synchronize()
            profiler.stop()
            if int(os.environ["RANK"]) == 0:
                profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        profilers.clear()

    def begin_step(self: Any, step: int) -> None:
        end_profile()
        begin(self, step)
        name = list(ARMS)[step % len(ARMS)]
        chunks = ARMS[name]
        roles = frozenset({"tp.forward", "tp.backward"})
        self.router.roles = frozenset() if chunks is None else roles
        overlaps[0]._chunks = chunks or 1
        if step >= rounds * len(ARMS) and torch.cuda.is_available():
            activities = [
                torch.profiler.ProfilerActivity.CPU,
                torch.profiler.ProfilerActivity.CUDA,
            ]
            profiler = torch.profiler.profile(activities=activities)
            profiler.start()
            profilers.append((name, profiler))

    def finished(self: Any) -> None:
        end_profile()
        finish(self)

    ForwardOverlap.__init__ = created  # type: ignore[method-assign]
    Session._begin_step = begin_step  # type: ignore[method-assign]
    Session.finish = finished  # type: ignore[method-assign]
    return run(config, overrides)


def report(folder: Path, rounds: int) -> list[str]:
    """Step times of the arms, and what their traces say."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    steps = [line for line in lines if line["event"] == "step"]
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for line in steps:
        step = line["iteration"] - 1
        if WARM_UP * len(ARMS) <= step < rounds * len(ARMS):
            times[list(ARMS)[step % len(ARMS)]].append(line["step_ms"])
    base = times["compressed"]
    text = ["| | ms a step, median (least - most) | compressed / this, paired |", "|---|---|---|"]
    for name, values in times.items():
        ratio = [a / b for a, b in zip(base, values, strict=True)]
        text.append(
            f"| {name} | {statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f}) | "
            f"{statistics.median(ratio):.3f} ({min(ratio):.3f} - {max(ratio):.3f}) |"
        )
    from megatron_taco.lab.trace import read_kernels, table, traced_ms

    for name in ARMS:
        path = folder / f"{name}.json.gz"
        if path.exists():
            kernels = read_kernels(path)
            text += ["", f"Trace of one step, {name}: {traced_ms(kernels):.1f} ms", ""]
            text += table(kernels)
    return text


def main() -> int:
    """Launch the ranks of one run and report, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder for the run's files")
    parser.add_argument("--rate", help="of an emulated link; default loopback")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each arm")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--own-gpus", action="store_true", help="two GPUs and their own link")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    folder = args.runs.resolve()
    config = folder / "config.yaml"
    if args.worker:
        return worker(str(config), folder, args.rounds, args.overrides)
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG % folder)
    steps = (args.rounds + (0 if args.cpu else 1)) * len(ARMS)
    overrides = [
        f"megatron.train_iters={steps}",
        f"megatron.sequence_parallel={str(args.sequence_parallel).lower()}",
        *args.overrides,
    ]
    if args.own_gpus:
        link = "own GPUs"
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    else:
        link = args.rate or "loopback"
        hosts = ["--hosts", "2", "--rate", args.rate] if args.rate else ["--ranks", "2"]
        mode = "--cpu" if args.cpu else "--share-gpu"
        start = ["-m", "megatron_taco.cli", "lab", "run", *hosts, mode, "--timeout", "300", "--"]
    code = subprocess.call(
        [
            *(sys.executable, *start, __file__, "--worker"),
            *("--runs", str(folder), "--rounds", str(args.rounds), *overrides),
        ],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(args.connections)},
    )
    if code:
        for log in sorted((folder / "run" / "logs").glob("*.log")):
            print(f"--- {log}\n{log.read_text()[-2000:]}", file=sys.stderr)
        return code
    print(
        f"\n### {link}, sequence parallel {args.sequence_parallel}, "
        f"CUDA_DEVICE_MAX_CONNECTIONS {args.connections} {' '.join(args.overrides)}\n"
    )
    print("\n".join(report(folder, args.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
