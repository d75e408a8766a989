"""Whole runs over data-parallel replicas: losses over seeds, bytes, and whether replicas are equal.

    python scripts/reproduce/data_parallel_training.py --arms none,sdp4bit,qw --seeds 1,2,3 \
        --steps 600
    python scripts/reproduce/data_parallel_training.py --arms methods --ranks 2,4 --steps 50
    python scripts/reproduce/data_parallel_training.py --model gpt-350m --arms none,sdp4bit,qw \
        --steps 500 --minutes 9 --at-once 3

With a GPU for each rank they use NCCL as it comes; where there are fewer all ranks share one (NCCL
over loopback sockets); without a GPU they are gloo ranks on the CPU. After --minutes the running
arm saves a checkpoint, and the same command goes on with it; finished runs are kept in
results.json. With --at-once several arms are trained beside each other. Every rank hashes every
weight after the last step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_taco.lab.markdown import markdown_table

ROOT = Path(__file__).resolve().parent.parent.parent
SECTION = "compression.data_parallel"
PLAIN = "none"
SHARDED = ["megatron.use_distributed_optimizer=true"]
WHOLE = ["megatron.use_distributed_optimizer=false"]
"""Gradient methods run without the distributed optimiser: one needs it off, none needs it."""
SDP4BIT = [f"{SECTION}.mode=on", f"{SECTION}.gradients.compressor=sdp4bit", *SHARDED]


def _method(name: str, *settings: str) -> list[str]:
    given = (f"compressor={name}", *settings)
    return [f"{SECTION}.mode=on", *(f"{SECTION}.gradients.{text}" for text in given), *WHOLE]


ARMS: dict[str, list[str]] = {
    PLAIN: SHARDED,
    "sdp4bit": [*SDP4BIT, f"{SECTION}.weights.compressor=sdp4bit"],
    "sdp4bit-gradients": SDP4BIT,
    "sdp4bit-nearest": [*SDP4BIT, f"{SECTION}.gradients.rounding=nearest"],
    "int4-weights": [  # differences of weights alone
        f"{SECTION}.mode=on",
        f"{SECTION}.gradients.compressor=none",
        f"{SECTION}.weights.compressor=sdp4bit",
        *SHARDED,
    ],
    "qw": [  # what fails: the weights themselves in four bits
        f"{SECTION}.mode=on",
        f"{SECTION}.gradients.compressor=none",
        f"{SECTION}.weights.compressor=sdp4bit",
        f"{SECTION}.weights.difference=false",
        *SHARDED,
    ],
    "taco": _method("taco"),
    "block-integer": _method("block_integer", "bits=6"),
    "powersgd": _method("powersgd", "rank=16"),
    "topk": _method("topk", "ratio=0.1"),
    "tagc": _method("tagc"),
    "pactrain": _method("pactrain", "ternary=true"),
    "homomorphic": _method("homomorphic"),
    "cd-adam": _method("cd_adam"),
    "sparseloco": _method("sparseloco", "local_steps=10", "ratio=0.25"),
}
METHODS = [name for name in ARMS if name not in ("sdp4bit-gradients", "int4-weights")]
MODELS: dict[str, list[str]] = {
    "tiny": ["--config", "configs/demo-cpu.yaml", "megatron.micro_batch_size=4"],
    "gpt-350m": [
        *("--config", "configs/gpt-350m.yaml", "data.path=null", "data.split=null"),
        *("data.source=python-stdlib", "data.tokenizer=bytes", "megatron.seq_length=1024"),
        *("megatron.micro_batch_size=8", "megatron.global_batch_size=16"),
        # The recipe's warm-up is 700 steps; a short run has to learn something.
        *("megatron.lr_warmup_fraction=null", "megatron.lr_warmup_iters=50"),
        *("megatron.eval_iters=20", "megatron.log_interval=1"),
    ],
}


def as_rank(path: Path) -> int:
    """Run all jobs of a file in this rank, one after the other, each in a child of this process.

    Megatron is imported once. Rank 0 says of each job whether there is time for it, and the port.
    """
    import megatron.training.training  # noqa: F401

    from megatron_taco.lab.places import free_port

    work = json.loads(path.read_text())
    rank = int(os.environ["RANK"])
    for number, job in enumerate(work["jobs"]):
        word = path.with_suffix(f".{number}")
        if rank == 0:
            draft = word.with_suffix(".new")
            draft.write_text(str(free_port()) if time.time() < work["until"] else "stop")
            draft.rename(word)
        while not word.exists():
            time.sleep(0.05)
        port = word.read_text()
        if port == "stop":
            break
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = port
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            code = 1
            try:
                code = one_run(Path(job["out"]), job["config"], job["overrides"])
            finally:
                sys.stderr.flush()
                for writer in multiprocessing.active_children():  # of checkpoints
                    writer.kill()
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


def one_run(out: Path, config: str, overrides: list[str]) -> int:
    """Train in this rank, then hash its weights; rank 0 writes whether all ranks' are the same."""
    import megatron.training.training as loop
    import torch.distributed as dist

    from megatron_taco.training.run import run

    original = loop.train

    def train(step: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(step, model, *args, **kwargs)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, hashes(model))
        if dist.get_rank() == 0:
            equal = all(found == every[0] for found in every)
            out.write_text(json.dumps({"equal": equal, "tensors": len(every[0])}))
        return result

    loop.train = train
    return run(config, overrides)


def hashes(model: list[Any]) -> dict[str, str]:
    """A hash of each weight of this rank, all gathers done."""
    found = {}
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
        for name, weight in chunk.module.named_parameters():
            values = weight.detach().cpu().contiguous().view(torch.uint8)
            found[name] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return found


def job_of(args: argparse.Namespace, arm: str, ranks: int, seed: int) -> dict[str, Any]:
    """What a rank has to know to train one arm, or to go on with it."""
    name = f"{args.model}-dp{ranks}-seed{seed}-{arm}"
    saved = args.runs / f"{name}-saved"
    _, config, *model = MODELS[args.model]
    goes_on = (saved / "latest_checkpointed_iteration.txt").exists()
    minutes = math.ceil(args.minutes)
    overrides = [
        *model,
        *("compression.tensor_parallel.mode=off", f"{SECTION}.min_bytes=64KiB", *ARMS[arm]),
        *("megatron.tensor_model_parallel_size=1", "megatron.pipeline_model_parallel_size=1"),
        *(f"megatron.train_iters={args.steps}", f"megatron.eval_interval={args.steps}"),
        *(f"megatron.seed={seed}", f"megatron.exit_duration_in_mins={minutes}"),
        *(f"megatron.save={saved}", f"megatron.save_interval={args.steps}"),
        *([f"megatron.load={saved}"] if goes_on else []),
        *(f"run.dir={args.runs}", f"run.name={name}", f"data.cache={args.runs / 'data'}"),
    ]
    if not goes_on:
        shutil.rmtree(args.runs / name, ignore_errors=True)
    out = str(args.runs / f"{name}.json")
    return {"name": name, "out": out, "config": str(ROOT / config), "overrides": overrides}


def start(args: argparse.Namespace, ranks: int, jobs: list[dict[str, Any]], until: float) -> bool:
    """Run jobs in as many launches of so many ranks as go at once, as long as there is time.

    Returns:
        Whether none failed.
    """
    launches = [
        _launch(args, ranks, jobs[k :: args.at_once], until)
        for k in range(min(args.at_once, len(jobs)))
    ]
    try:
        codes = [process.wait() for process, _ in launches]
    finally:
        for process, work in launches:
            process.terminate()  # the launcher ends its ranks
            shutil.rmtree(work, ignore_errors=True)
    return not any(codes)


def _launch(
    args: argparse.Namespace, ranks: int, jobs: list[dict[str, Any]], until: float
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start processes of so many ranks that run jobs one after the other; and their folder."""
    work = args.runs / f"work-{time.time_ns()}"
    work.mkdir()
    path = work / "jobs.json"
    path.write_text(json.dumps({"jobs": jobs, "until": until}))
    if 0 < torch.cuda.device_count() < ranks:
        launcher = ["-m", "megatron_taco.lab.shared_gpu", "--ranks", str(ranks), "--"]
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(Path(__file__).resolve()), "--rank", str(path)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL), work


def record_of(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any] | None:
    """What a report keeps of a run, or None if it has not ended."""
    metrics = args.runs / job["name"] / "metrics.jsonl"
    if not metrics.exists():
        return None
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = {line["iteration"]: line for line in lines if line["event"] == "step"}
    validation = [line["loss"] for line in lines if line["event"] == "validation"]
    if args.steps not in steps or not validation or not Path(job["out"]).exists():
        return None
    shutil.rmtree(args.runs / f"{job['name']}-saved", ignore_errors=True)
    flows = [flow for step in steps.values() for flow in step["flows"].items()]
    return {
        **json.loads(Path(job["out"]).read_text()),
        "loss": [step["loss"] for step in steps.values()],
        "validation": validation[-1],
        "step_ms": statistics.median(step["step_ms"] for step in steps.values()),
        **{
            f"{role}_{key}": sum(f[f"{key}_bytes"] for n, f in flows if n.startswith(f"dp.{role}"))
            for role in ("gradients", "weights")
            for key in ("raw", "wire")
        },
    }


def last(record: dict[str, Any]) -> float:
    """The mean loss of the last tenth of the steps."""
    losses = [math.nan if loss is None else loss for loss in record["loss"]]
    return statistics.fmean(losses[-max(10, len(losses) // 10) :])


def report(results: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """A table for each number of ranks: an arm a row, over the seeds that are done."""
    lines = []
    for ranks in args.ranks:
        rows = []
        for arm in args.arms:
            keys = [(seed, f"{args.model}-dp{ranks}-seed{seed}-{arm}") for seed in args.seeds]
            found = {seed: results[key] for seed, key in keys if key in results}
            if not found:
                continue
            plain = {
                seed: results.get(f"{args.model}-dp{ranks}-seed{seed}-{PLAIN}") for seed in found
            }
            row = [arm, ", ".join(f"{last(r):.4f}" for r in found.values())]
            pairs = [(r, plain[seed]) for seed, r in found.items() if plain[seed]]
            for value in (last, lambda record: record["validation"]):
                row.append(_changes([value(r) / value(p) - 1 for r, p in pairs]))
            for role in ("gradients", "weights"):
                raw, wire = (sum(r[f"{role}_{k}"] for r in found.values()) for k in ("raw", "wire"))
                row.append(f"{wire / raw:.3f}" if raw else "-")
            row.append("yes" if all(r["equal"] for r in found.values()) else "NO")
            rows.append(row)
        head = ["arm", "loss, last tenth", "change, by seed", "validation loss"]
        head += ["gradients wire/raw", "weights wire/raw", "replicas equal to the bit"]
        lines += ["", f"{ranks} replicas:", "", *markdown_table(head, rows)]
    return lines


def _changes(changes: list[float]) -> str:
    shown = ", ".join(f"{change:+.2%}" for change in changes)
    if len(changes) < 2:
        return shown
    mean, spread = statistics.fmean(changes), statistics.stdev(changes)
    return f"{shown}; mean {mean:+.2%}, standard deviation {spread:.2%}"


def main() -> int:
    """Train what is not done yet, then print the tables."""
    if sys.argv[1:2] == ["--rank"]:
        return as_rank(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--arms", default=f"{PLAIN},sdp4bit,qw", help=", ".join(ARMS))
    parser.add_argument("--seeds", default="1234")
    parser.add_argument("--ranks", default="2", help="numbers of replicas, with commas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=1e4, help="then save and stop")
    parser.add_argument("--at-once", type=int, default=1, help="arms beside each other")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "data-parallel")
    args = parser.parse_args()
    args.arms = METHODS if args.arms == "methods" else args.arms.split(",")
    if unknown := [arm for arm in args.arms if arm not in ARMS]:
        parser.error(f"{unknown[0]!r} is no arm; allowed: methods, {', '.join(ARMS)}")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.ranks = [int(ranks) for ranks in args.ranks.split(",")]
    args.runs = args.runs.resolve()
    args.runs.mkdir(parents=True, exist_ok=True)
    kept = args.runs / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    until, left = time.time() + 60 * args.minutes, 0
    for ranks in args.ranks:
        keys = {
            f"{args.model}-dp{ranks}-seed{seed}-{arm}": (arm, ranks, seed)
            for seed in args.seeds
            for arm in args.arms
        }

        def is_missing(key: str) -> bool:
            return len(results.get(key, {}).get("loss", ())) != args.steps

        missing = list(filter(is_missing, keys))
        if missing and time.time() < until:
            jobs = [job_of(args, *keys[key]) for key in missing]
            fine = start(args, ranks, jobs, until)
            for job in jobs:
                record = record_of(args, job)
                if record is not None:
                    results[job["name"]] = record
            kept.write_text(json.dumps(results))
            if not fine:
                sys.exit(f"a run failed; logs are in {args.runs}/NAME/logs")
        left += sum(map(is_missing, keys))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"`python scripts/reproduce/data_parallel_training.py {' '.join(sys.argv[1:])}`")
    print(f"{args.model}, {args.steps} steps, {where}, torch {torch.__version__}")
    print("\n".join(report(results, args)))
    if left:
        print(f"\nNot done yet, {left} runs are left: the same command goes on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
