"""All methods of the data-parallel axis side by side: bytes, time on links, loss.

    python scripts/reproduce/gradient_methods.py --steps 200 --out docs/results/gradient-methods.md

Losses are of runs of the trainer (configs/demo-cpu.yaml as data parallel 2, Python's standard
library as text), one after the other. Times are of one reduction of a small transformer's
gradients, made up of random numbers, between two ranks in the lab, on the device that there is:
two GPUs, or one that both ranks share, or the CPU over gloo. ``--parts`` does one of the two;
figures are kept in ``--json`` from call to call. Needs root for the lab.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_taco import compressors
from megatron_taco.cli.lab_arguments import words
from megatron_taco.collectives import buckets
from megatron_taco.collectives.segments import Run
from megatron_taco.config.data_parallel import SDP4BIT_GRADIENTS
from megatron_taco.config.gradient_methods import METHOD_SETTINGS, method_settings
from megatron_taco.gradients.messages import ring_bytes
from megatron_taco.lab.markdown import markdown_table
from megatron_taco.patching.data_methods import maker
from megatron_taco.patching.data_plans import GRADIENTS, Plan, Stream, one_shot

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "demo-cpu.yaml"
SECTION = "compression.data_parallel"
PLAIN = "none"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"compressor": "none"},
    "SDP4Bit": {"compressor": "sdp4bit"},
    "TACO E4M3": {"compressor": "taco"},
    "block integer, 6 bits": {"compressor": "block_integer", "bits": 6},
    "PowerSGD, rank 4": {"compressor": "powersgd", "rank": 4},
    "PowerSGD, rank 16": {"compressor": "powersgd", "rank": 16},
    "top-k 1%, SIDCo": {"compressor": "topk", "ratio": 0.01},
    "top-k 10%, SIDCo": {"compressor": "topk", "ratio": 0.1},
    "top-k 10%, sorted": {"compressor": "topk", "ratio": 0.1, "selection": "sort"},
    "TAGC 5%": {"compressor": "tagc", "ratio": 0.05},
    "PacTrain, ternary": {"compressor": "pactrain", "ternary": True},
    "homomorphic": {"compressor": "homomorphic"},
    "CD-Adam, 4 bits": {"compressor": "cd_adam"},
    "SparseLoCo, 10 local steps": {"compressor": "sparseloco", "local_steps": 10},
    "SparseLoCo, 10 local steps, 25%": {
        "compressor": "sparseloco",
        "local_steps": 10,
        "ratio": 0.25,
    },
    "SparseLoCo, 10 local steps, all values, 8 bits": {
        "compressor": "sparseloco",
        "local_steps": 10,
        "ratio": 1,
        "bits": 8,
    },
}
HIDDEN, LAYERS, VOCABULARY = 256, 4, 512
REPETITIONS = 5
PARTS = ("losses", "links")


def train(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run the trainer with one method; returns losses and bytes of the gradients' axis."""
    run = name.replace(" ", "-").replace(",", "").replace("%", "").lower()
    arm = ARMS[name]
    compress = [f"{SECTION}.mode=on", f"{SECTION}.min_bytes=64KiB"]
    compress += [f"{SECTION}.gradients.{key}={str(value).lower()}" for key, value in arm.items()]
    command = [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_taco.pretrain", "--config", str(CONFIG)),
        *(f"run.dir={folder}", f"run.name={run}", "compression.tensor_parallel.mode=off"),
        "megatron.tensor_model_parallel_size=1",
        "megatron.pipeline_model_parallel_size=1",
        *("megatron.micro_batch_size=8", f"megatron.train_iters={steps}"),
        f"megatron.eval_interval={steps}",
        *(compress if name != PLAIN else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    flows = next((line["flows"] for line in lines if line["event"] == "end"), {})
    sent = [flow for role, flow in flows.items() if role.startswith(GRADIENTS)]
    return {
        "loss": statistics.fmean(losses[-10:]),
        "validation": next(line["loss"] for line in lines if line["event"] == "validation"),
        "raw": sum(flow["raw_bytes"] for flow in sent),
        "wire": sum(flow["wire_bytes"] for flow in sent),
    }


def gradients(rank: int, step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random gradients of a transformer's matrices, FP32, by name."""
    h = HIDDEN
    shapes = {"embedding.weight": (VOCABULARY, h)}
    for layer in range(LAYERS):
        shapes |= {
            f"decoder.layers.{layer}.attention.qkv.weight": (3 * h, h),
            f"decoder.layers.{layer}.attention.proj.weight": (h, h),
            f"decoder.layers.{layer}.mlp.fc1.weight": (4 * h, h),
            f"decoder.layers.{layer}.mlp.fc2.weight": (h, 4 * h),
        }
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randn(s, generator=generator).to(device) for n, s in shapes.items()}


def reducer(name: str, device: torch.device) -> Any:
    """Return what reduces gradients once by a method: a function of them and the step."""
    group = dist.group.WORLD
    assert group is not None
    given = dict(ARMS[name])
    kind = given.pop("compressor")
    if kind == "sparseloco":  # its exchange, which a run has once in a round
        given["local_steps"] = 1
    if kind in METHOD_SETTINGS:
        method = maker(kind, method_settings(kind, given), 1234)(group, "bucket")
        if kind == "sparseloco":
            method.begin(gradients(0, 0, device))
        return method.reduce
    flat = torch.cat([g.view(-1) for g in gradients(dist.get_rank(), 0, device).values()])
    if kind == PLAIN:
        return lambda tensors, step: dist.all_reduce(flat)
    code = (
        compressors.build("block_integer", **SDP4BIT_GRADIENTS)
        if kind == "sdp4bit"
        else compressors.build(kind, **given)
    )
    stream = Stream(role=GRADIENTS, compressor=code, exclude=frozenset(), min_bytes=0, start_step=0)
    plan = Plan("bucket", (Run(0, flat.numel(), "mlp"),), flat.numel(), stream, 4)
    size = group.size()

    def reduce(tensors: dict[str, torch.Tensor], step: int) -> None:
        buckets.all_reduce(
            flat,
            slices=plan.slices(1 if one_shot(size) else size, equal=False),
            group=group,
            codec=stream.codec(step, "bucket", group.rank(), 1234),
            average=True,
            on_part=lambda *_: None,
        ).wait()

    return reduce


def measure(names: list[str], out: Path) -> None:
    """In a rank of the lab: time reductions, of the slowest rank; rank 0 writes medians in ms."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, found = dist.get_rank(), {}
    for name in names:
        reduce, times = reducer(name, device), []
        for step in range(REPETITIONS + 1):  # the first makes memory, and compiles
            tensors = gradients(rank, step, device)
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            reduce(tensors, step)
            if cuda:
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - start], device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times.append(float(slowest) * 1e3)
        found[name] = {
            "ms": statistics.median(times[1:]),
            "least": min(times[1:]),
            "most": max(times[1:]),
        }
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def on_link(rate: str, names: list[str], folder: Path) -> dict[str, Any]:
    """Time the methods between two hosts of the lab with a link of ``rate``."""
    out = folder / f"{rate}.json"
    gpus = torch.cuda.device_count()
    places = [] if gpus > 1 else ["--share-gpu"] if gpus else ["--cpu"]
    command = [
        *(sys.executable, "-m", "megatron_taco.cli", "lab", "run", "--hosts", "2", "--rate", rate),
        *(*places, "--", str(Path(__file__).resolve()), "--measure", str(out)),
        *("--arms", ";".join(names)),
    ]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return dict(json.loads(out.read_text()))


def table(results: dict[str, Any]) -> list[str]:
    """The report's table, a row a method."""
    rates = list(results["links"])
    numel = sum(g.numel() for g in gradients(0, 0, torch.device("cpu")).values())
    rows = []
    plain = results["runs"].get(PLAIN)
    for name in ARMS:
        run = results["runs"].get(name)
        row = [name]
        if run is None:
            row += ["-"] * 3
        else:
            ratio = run["wire"] / run["raw"] if run["raw"] else 1.0
            change = "" if plain in (None, run) else f" ({run['loss'] / plain['loss'] - 1:+.2%})"
            row += [f"{ratio:.3f}", f"{run['loss']:.4f}{change}", f"{run['validation']:.4f}"]
        for rate in rates:
            link = results["links"][rate].get(name)
            row.append(
                f"{link['ms']:.0f} ({link['least']:.0f}-{link['most']:.0f})" if link else "-"
            )
        rows.append(row)
    head = ["method", "wire/raw", "loss, mean of last 10", "validation loss"]
    head += [f"ms at {rate}" for rate in rates]
    plain_ms = ring_bytes(numel * 4, 2) * 8 / 1e6
    note = f"The plain reduction sends {numel * 4 / 2**20:.1f} MiB each way: {plain_ms:.0f} ms"
    return [*markdown_table(head, rows), "", f"{note} at 1 Gbit/s by itself."]


def main() -> None:
    """Train, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", nargs="+", default=["1Gbit", "10Gbit"])
    parser.add_argument("--parts", type=words(PARTS), default=list(PARTS))
    parser.add_argument("--arms", default=";".join(ARMS), help="names with semicolons between")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "gradient-methods")
    parser.add_argument("--json", type=Path, help="figures; what is there is kept")
    parser.add_argument("--out", type=Path, help="gets the table; by default it is printed")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.arms.split(";")
    if unknown := [name for name in names if name not in ARMS]:
        parser.error(f"{unknown[0]!r} is no method; allowed: {'; '.join(ARMS)}")
    if arguments.measure is not None:
        measure(names, arguments.measure)
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    kept = arguments.json or arguments.runs / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {"runs": {}, "links": {}}

    def keep() -> None:
        kept.write_text(json.dumps(results, indent=1))

    if "links" in arguments.parts:
        for rate in arguments.rates:
            results["links"].setdefault(rate, {}).update(on_link(rate, names, arguments.runs))
            keep()
    if "losses" in arguments.parts:
        for name in names:
            results["runs"][name] = train(name, arguments.steps, arguments.runs)
            print(name, results["runs"][name], flush=True)
            keep()
    command = "`python scripts/reproduce/gradient_methods.py " + " ".join(sys.argv[1:]) + "`"
    where = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
    text = "\n".join([f"{command}, {where}", "", *table(results), ""])
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
