"""Whether a boundary that is cut computes what one in place does, and projectors stay orthonormal.

    python scripts/reproduce/boundary_equality.py --parts stages,layouts,orthonormality

Tiny models on real text in FP32 (orthonormality: BF16, too), CPU processes over gloo, one run after
the other:

    stages          50 steps with 1, 2 and 4 stages: losses, and what both ends hold
    layouts         5 steps in every layout of the ranks, both kinds of loss: the same projectors
    orthonormality  1000 steps in one process

All runs but the last go on from the first step of one process, so that weights are the same. A run
whose figures are in ``--json`` is not made again; a long one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_taco.cli.lab_arguments import words
from megatron_taco.data import ByteTokenizer, stdlib
from megatron_taco.lab.forked import Forked
from megatron_taco.lab.markdown import markdown_table

ROOT = Path(__file__).resolve().parent.parent.parent
SECTION = "compression.pipeline_parallel"
MODEL = """
run: {name: run, device: cpu}
data: {train_path: %s, valid_path: %s, tokenizer: bytes}
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  max_position_embeddings: 64
  position_embedding_type: rope
  normalization: RMSNorm
  swiglu: true
  add_bias_linear: false
  make_vocab_size_divisible_by: 192 # the same padding for tensor parallel 1 and 2
megatron:
  micro_batch_size: 2
  global_batch_size: 8
  lr: 3.0e-3
  lr_decay_style: constant
  lr_decay_iters: 2000
  eval_iters: 0
  log_interval: 1
  attention_dropout: 0.0
  hidden_dropout: 0.0
compression:
  pipeline_parallel:
    mode: on
    rank: 16
    after_layers: [1, 2, 3]
    check_every: 0 # compared at the end
"""
QUANTIZER = f"{SECTION}.quantizer"
NONE = "no boundaries"
CALM = [
    *("megatron.lr=1.0e-3", "megatron.min_lr=1.0e-4", "megatron.lr_decay_style=cosine"),
    *("megatron.lr_warmup_iters=10", "megatron.lr_decay_iters=51"),
]
"""Of 50 steps: with 0.003 from the first step on the loss jumps, and any rounding grows with it."""
ARMS = {
    "MAPL": [],
    NONE: [f"{SECTION}.mode=off"],
    "MAPL + INT8": [f"{QUANTIZER}.forward.kind=int8", f"{QUANTIZER}.backward.kind=int8"],
    "MAPL + RVQ": [
        *(f"{QUANTIZER}.forward.kind=rvq", f"{QUANTIZER}.backward.kind=int8"),
        *(f"{QUANTIZER}.forward.warmup_steps=10", f"{QUANTIZER}.forward.codes=64"),
    ],
}
STAGES = (1, 2, 4)
STAGE_STEPS, LAYOUT_STEPS, LONG_STEPS, SAVED_EVERY = 50, 5, 1000, 100
PARTS = ("stages", "layouts", "orthonormality")
SEQUENCES = 8
TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are laid out, and how a global batch of ``SEQUENCES`` is cut."""

    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    micro_batches: int = 4
    per_token: bool = False

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.dp * self.tp * self.pp

    def overrides(self) -> list[str]:
        """The trainer's settings."""
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "sequence_parallel": self.sp,
            "micro_batch_size": SEQUENCES // (self.dp * self.micro_batches),
            "calculate_per_token_loss": self.per_token,
        }
        return [f"megatron.{key}={str(value).lower()}" for key, value in sizes.items()]

    def __str__(self) -> str:
        """Return its name."""
        name = f"dp{self.dp}-tp{self.tp}{'sp' if self.sp else ''}-pp{self.pp}-m{self.micro_batches}"
        return name + ("-per-token" if self.per_token else "")


def layouts() -> Iterator[Layout]:
    """Every layout of the matrix, the reference first."""
    tensor = ((1, False), (2, False), (2, True))
    every = itertools.product((1, 4), (False, True), (1, 2), (1, 2), tensor)
    for micro_batches, per_token, pp, dp, (tp, sp) in every:
        yield Layout(dp=dp, tp=tp, sp=sp, pp=pp, micro_batches=micro_batches, per_token=per_token)


def rank_main(folder: Path, name: str, overrides: list[str]) -> int:
    """Train as one rank; leaves what it holds of each boundary in its run folder."""
    from megatron_taco.patching.session import Session
    from megatron_taco.training.run import run

    class Looking(Session):
        def finish(self) -> None:
            super().finish()
            held: dict[int, dict[str, Any]] = {}
            boundaries = {} if self.boundaries is None else self.boundaries.boundaries
            for number, boundary in boundaries.items():
                assert boundary.projector is not None
                held[number] = {k: v.clone() for k, v in boundary.shared_state().items()}
                held[number]["rounded"] = float(boundary.projector.orthonormality(torch.bfloat16))
                held[number]["repairs"] = boundary.projector.repairs
            torch.save(held, folder / name / f"held{torch.distributed.get_rank()}.pt")

    torch.set_num_threads(1)
    common = [f"run.dir={folder}", f"run.name={name}"]
    return run(str(folder / "model.yaml"), [*common, *overrides], make_session=Looking)


class Runner:
    """Trains, and compares what ranks hold.

    Args:
        folder: Of run folders, logs and checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        data = stdlib.prepare(folder / "data", ByteTokenizer())
        text = MODEL % (data.train_prefix, data.valid_prefix)
        (folder / "model.yaml").write_text(text, encoding="utf-8")
        self._forked = Forked(cpu=True)

    def train(self, name: str, ranks: int, overrides: list[str]) -> list[dict[int, dict[str, Any]]]:
        """Train on some ranks; returns what each holds of its boundaries, by number."""
        log = self.folder / f"{name}.log"
        codes = self._forked.run(
            rank_main,
            (self.folder, name, overrides),
            ranks=ranks,
            log=log,
            timeout_s=TIMEOUT_S,
        )
        if any(codes):
            sys.exit(f"{name}: exit codes {codes}\n{Path(f'{log}.0').read_text()[-3000:]}")
        return [torch.load(self.folder / name / f"held{rank}.pt") for rank in range(ranks)]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The logged steps of a run, each once."""
        text = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8")
        steps = [line for line in map(json.loads, text.splitlines()) if line["event"] == "step"]
        return list({line["iteration"]: line for line in steps}.values())

    def start(self, arm: str, more: list[str] | None = None) -> list[str]:
        """Settings that go on from the first step of one process, which is made if need be."""
        more = more or []
        name = f"start{'-calm' if more else ''}-{list(ARMS).index(arm)}"
        saved = self.folder / name / "saved"
        if not (saved / "latest_checkpointed_iteration.txt").exists():
            save = [f"megatron.save={saved}", "megatron.save_interval=1", "megatron.train_iters=1"]
            self.train(name, 1, [*ARMS[arm], *more, *save])
        return [*more, f"megatron.load={saved}", "megatron.override_opt_param_scheduler=true"]

    def compare(self, name: str, held: list[dict[int, dict[str, Any]]]) -> dict[str, Any]:
        """What the ranks of a run hold: whether copies are equal, and one copy's numbers."""
        copies: dict[int, list[dict[str, Any]]] = {}
        for rank in held:
            for number, state in rank.items():
                copies.setdefault(number, []).append(state)
        equal = all(
            torch.equal(value, each[0][key])
            for each in copies.values()
            for state in each
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        )
        torch.save({number: each[0] for number, each in copies.items()}, self.kept(name))
        return {
            "losses": [line["loss"] for line in self.lines(name)],
            "copies": sorted(len(each) for each in copies.values()),
            "equal": equal,
        }

    def kept(self, name: str) -> Path:
        """Where one copy of a run's boundaries is kept."""
        return self.folder / name / "boundaries.pt"

    def distance(self, name: str, other: str) -> dict[str, float]:
        """Largest difference of projectors, and relative difference of their momenta."""
        ours, theirs = torch.load(self.kept(name)), torch.load(self.kept(other))
        found = {"projector": 0.0, "momentum": 0.0}
        for number, state in ours.items():
            a, m = state["projector"], state["momentum"]
            far = float((a - theirs[number]["projector"]).abs().max())
            turned = (m - theirs[number]["momentum"]).norm() / theirs[number]["momentum"].norm()
            found["projector"] = max(found["projector"], far)
            found["momentum"] = max(found["momentum"], float(turned))
        return found


def run_stages(runner: Runner, results: dict[str, Any]) -> Iterator[None]:
    """Train each arm with 1, 2 and 4 stages; yields after each run."""
    for arm, stages in itertools.product(ARMS, STAGES):
        name = f"stages{stages}-{list(ARMS).index(arm)}"
        if name in results:
            continue
        end = f"megatron.train_iters={1 + STAGE_STEPS}"
        layout = Layout(pp=stages).overrides()
        overrides = [*ARMS[arm], *layout, end, *runner.start(arm, CALM)]
        results[name] = {
            **runner.compare(name, runner.train(name, stages, overrides)),
            "arm": arm,
            "stages": stages,
        }
        yield


def run_layouts(runner: Runner, results: dict[str, Any]) -> Iterator[None]:
    """Train in every layout; yields after each run."""
    first = str(next(layouts()))
    for layout in layouts():
        name = str(layout)
        if name in results:
            continue
        end = f"megatron.train_iters={1 + LAYOUT_STEPS}"
        overrides = [*layout.overrides(), end, *runner.start("MAPL")]
        found = runner.compare(name, runner.train(name, layout.ranks, overrides))
        results[name] = {**found, **runner.distance(name, first)}
        yield


def run_orthonormality(runner: Runner, results: dict[str, Any]) -> Iterator[None]:
    """Train long in FP32 and BF16; yields after each part of a run."""
    for dtype in ("fp32", "bf16"):
        name = f"long-{dtype}"
        saved = runner.folder / name / "saved"
        tracker = saved / "latest_checkpointed_iteration.txt"
        while name not in results:
            done = int(tracker.read_text()) if tracker.exists() else 0
            end = done + SAVED_EVERY
            overrides = [f"megatron.bf16={str(dtype == 'bf16').lower()}"]
            overrides += [f"megatron.micro_batch_size={SEQUENCES}"]
            overrides += [f"megatron.save={saved}", f"megatron.save_interval={SAVED_EVERY}"]
            overrides += [
                f"megatron.train_iters={LONG_STEPS}",
                f"megatron.exit_interval={SAVED_EVERY}",
            ]
            overrides += [f"megatron.load={saved}"] if done else []
            (held,) = runner.train(name, 1, overrides)
            if end >= LONG_STEPS:
                rows = [b for line in runner.lines(name) for b in line["boundaries"].values()]
                results[name] = {
                    "steps": len(runner.lines(name)),
                    "master": max(row["orthonormality"] for row in rows),
                    "rounded": max(each["rounded"] for each in held.values()),
                    "repairs": sum(each["repairs"] for each in held.values()),
                    "loss": [runner.lines(name)[index]["loss"] for index in (0, -1)],
                }
            yield


RUN = {"stages": run_stages, "layouts": run_layouts, "orthonormality": run_orthonormality}


def stages_table(results: dict[str, Any]) -> list[str]:
    """Losses of stages against one process, and both ends against each other."""
    head = ["arm", "stages", "loss, first step", "relative", f"loss, step {STAGE_STEPS}"]
    head += ["relative", "largest of all steps", "both ends"]
    rows = []
    for index, arm in enumerate(ARMS):
        one = results.get(f"stages1-{index}")
        for stages in STAGES:
            found = results.get(f"stages{stages}-{index}")
            if found is None or one is None:
                continue
            pairs = list(zip(found["losses"], one["losses"], strict=True))
            change = [abs(ours / theirs - 1) for ours, theirs in pairs]
            row = [arm, str(stages)]
            for step in (0, STAGE_STEPS - 1):
                row += [f"{found['losses'][step]:.6f}"]
                row += ["" if stages == 1 else f"{change[step]:.1e}"]
            row += ["", ""] if stages == 1 else [f"{max(change):.1e}", same(found)]
            if arm == NONE:
                row[-1] = ""
            rows.append(row)
    return markdown_table(head, rows)


def same(found: dict[str, Any]) -> str:
    """Whether all copies of the boundaries are equal in every bit."""
    return "bit-equal" if found["equal"] else "**differ**"


def layouts_table(results: dict[str, Any]) -> list[str]:
    """The whole matrix, a row a layout of the ranks."""
    head = ["ranks", "micro-batches", "loss", "copies", "projector", "momentum", "step 5 loss"]
    rows = []
    first = results[str(next(layouts()))]
    for layout in layouts():
        found = results.get(str(layout))
        if found is None:
            continue
        sp = " SP" if layout.sp else ""
        rows.append(
            [
                f"DP {layout.dp} × TP {layout.tp}{sp} × PP {layout.pp}",
                str(layout.micro_batches),
                "per token" if layout.per_token else "per micro-batch",
                f"{max(found['copies'])}, {same(found)}",
                f"{found['projector']:.1e}",
                f"{found['momentum']:.1e}",
                f"{abs(found['losses'][-1] / first['losses'][-1] - 1):.1e}",
            ]
        )
    return markdown_table(head, rows)


def orthonormality_table(results: dict[str, Any]) -> list[str]:
    """What the projectors were through the long runs."""
    head = ["activations", "steps", "loss", "largest max abs(A'A − I) of the master", "repairs"]
    head += ["A rounded to BF16, at the end"]
    rows = []
    for dtype in ("fp32", "bf16"):
        found = results.get(f"long-{dtype}")
        if found is not None:
            first, last = found["loss"]
            row = [dtype.upper(), str(found["steps"]), f"{first:.3f} to {last:.3f}"]
            rows.append([*row, f"{found['master']:.1e}", f"{found['repairs']}"])
            rows[-1].append(f"{found['rounded']:.1e}")
    return markdown_table(head, rows)


TABLES = {
    "stages": stages_table,
    "layouts": layouts_table,
    "orthonormality": orthonormality_table,
}


def main() -> None:
    """Run what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=words(PARTS), default=list(PARTS), metavar="LIST")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "boundary-equality")
    parser.add_argument("--json", type=Path, help="figures; what is there is kept")
    parser.add_argument("--out", type=Path, help="gets the tables; by default they are printed")
    args = parser.parse_args()
    start = time.monotonic()
    args.runs = args.runs.resolve()
    runner = Runner(args.runs)
    file = args.json or args.runs / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts:
        found = results.setdefault(part, {})
        for _ in RUN[part](runner, found):
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{part}: {len(found)} runs, {time.monotonic() - start:.0f} s", flush=True)
            if time.monotonic() - start > args.seconds:
                print("no time left: the same command goes on from here", flush=True)
                return
    where = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
    lines = [f"{where}, Python {platform.python_version()}."]
    for part in args.parts:
        lines += ["", f"## {part.capitalize()}", "", *TABLES[part](results[part])]
    if args.out is None:
        print("\n".join(lines))
    else:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
