"""Megatron-LM's own pretrain_gpt.py, not edited, with and without compression, on one GPU.

    python scripts/reproduce/one_gpu_drop_in.py --megatron-lm ~/Megatron-LM --at-once 3 \
        --out results.md

Two (TP 2) or four (TP 2 × PP 2) NCCL ranks share the card and train on text (the Python standard
library's sources as bytes). Every part trains the script without us, with compression, and in some
parts with `mode: off`. Checked: each enabled role was compressed, the loss of the last steps is
within 0.5% (boundaries, which change the model, excepted), `off` equals the script without us in
every bit, and a resumed run equals one that was not stopped. Exit code 1 if a check fails (with
`--json`, in a list of parts, the report alone says so).

Runs that are there already (`--runs`) are not repeated, so the command can be given again after a
time limit: `--seconds` starts no run after so many. With `--cpu` a tiny model runs over gloo;
parts that need Transformer Engine are then left out, and the report says so. Of the checkout
pretrain_gpt.py and what it imports beside `megatron` are used; it has to be of the release of the
installed megatron-core.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from megatron_taco.cli.lab_arguments import words
from megatron_taco.data import load_tokenizer, stdlib
from megatron_taco.lab.markdown import markdown_table
from megatron_taco.training.run_folder import environment

HERE = Path(__file__).resolve().parent
PLAIN, ON, OFF = "without us", "on", "off"
LAST, BOUND = 10, 0.005
BOUNDARIES = "boundaries"

ROPE = ["--position-embedding-type", "rope", "--rotary-base", "1000000", "--no-rope-fusion"]
QWEN = [
    *ROPE,
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2"),
]
SIZES = {
    "gpu": "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --num-workers 1",
    "cpu": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --num-workers 0 "
    "--distributed-backend gloo --use-cpu-initialization --attention-backend unfused",
}
COMMON = (
    "--bf16 --lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 511 --log-interval 1 --eval-interval 100000 "
    "--eval-iters 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion"
)
DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True)
class Part:
    """One comparison.

    Attributes:
        title: For the report.
        flags: The script's, beside the common ones.
        arms: What is trained.
        stages: Pipeline-parallel size.
        te: Whether it needs Transformer Engine.
        ours: Dotted flags of the compressed arm, beside those of all.
    """

    title: str
    flags: list[str]
    arms: tuple[str, ...] = (PLAIN, ON)
    stages: int = 1
    te: bool = False
    ours: tuple[str, ...] = ()


LOCAL = ["--transformer-impl", "local"]
TE = ["--transformer-impl", "transformer_engine"]
SPEC = ["--spec", "megatron_taco.training.model", "te_block_spec"]
SP = ["--sequence-parallel"]
ALL = (PLAIN, ON, OFF)
PARTS = {
    "local": Part("`--transformer-impl local`", LOCAL, ALL),
    "te": Part("`--transformer-impl transformer_engine`", TE, ALL, te=True),
    "te-sp": Part("the same with sequence parallelism", [*TE, *SP], ALL, te=True),
    "mixed": Part("Transformer Engine's attention and norms", [*LOCAL, *SPEC], te=True),
    "mixed-sp": Part("the same, sequence parallelism", [*LOCAL, *SPEC, *SP], te=True),
    "qwen2.5": Part("Qwen2.5's architecture", [*LOCAL, *QWEN, "--add-qkv-bias"]),
    "qwen3": Part(
        "Qwen3's architecture",
        [*LOCAL, *QWEN, "--qk-layernorm", "--untie-embeddings-and-output-weights"],
    ),
    BOUNDARIES: Part(
        "MAPL boundary, TP 2 × PP 2",
        LOCAL,
        stages=2,
        ours=(
            "--compression.pipeline_parallel.mode=on",
            "--compression.pipeline_parallel.boundary=mapl",
            "--compression.pipeline_parallel.rank=32",
        ),
    ),
    "resume": Part("save and resume", LOCAL, (ON, "saved", "resumed")),
}


class Runs:
    """Trains the arms of parts, each once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._running: list[subprocess.Popen[bytes]] = []
        self.deadline = time.monotonic() + args.seconds
        self.folder: Path = args.runs.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        data = stdlib.prepare(self.folder / "data", load_tokenizer("bytes"))
        self.data = ["--data-path", str(data.train_prefix), "--split", "100,0,0"]

    def record(self, name: str, arm: str) -> dict[str, Any]:
        """Train an arm, or read what an earlier call has found."""
        folder = self._run(name, arm)
        kept = folder / "record.json"
        if kept.is_file():
            found: dict[str, Any] = json.loads(kept.read_text())
            return found
        if time.monotonic() > self.deadline:
            sys.exit(f"{self.args.seconds:g} s are over before {name}, {arm}: give this again")
        if arm == "resumed":
            self._copy_checkpoints(name, folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        print(f"training: {name}, {arm}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                self._command(PARTS[name], arm, folder),
                stdout=log, stderr=subprocess.STDOUT, env=self._environment(),
            )  # fmt: skip
            self._running.append(process)
            code = process.wait()
        if code:
            sys.exit(f"{(folder / 'log.txt').read_text()[-4000:]}\n{name}, {arm}: exit code {code}")
        found = {
            "losses": losses_of(folder),
            "flows": flows_of(folder),
            "seconds": time.perf_counter() - start,
        }
        kept.write_text(json.dumps(found))
        return found

    def all_of(self, name: str) -> dict[str, dict[str, Any]]:
        """Train the arms of a part; what ends this program ends them."""
        arms = PARTS[name].arms
        at_once = 1 if name == "resume" else self.args.at_once  # a run that goes on from another
        with ThreadPoolExecutor(at_once) as pool:
            try:
                trained = list(pool.map(functools.partial(self.record, name), arms))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self._running:
                    process.terminate()  # the launcher ends its ranks
                raise
        return dict(zip(arms, trained, strict=True))

    def forget(self) -> None:
        """Remove the runs of this call's parts, so that they are made anew next time."""
        for name in self.args.parts:
            for arm in PARTS[name].arms:
                shutil.rmtree(self._run(name, arm), ignore_errors=True)

    def _run(self, name: str, arm: str) -> Path:
        return self.folder / f"{name}-{arm.replace(' ', '-')}"

    def _copy_checkpoints(self, name: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / f"{name}-saved", folder)
        (folder / "record.json").unlink()

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return environment if self.args.cpu else environment | DETERMINISTIC

    def _command(self, part: Part, arm: str, folder: Path) -> list[str]:
        args = self.args
        device = ["--device", "cpu"] if args.cpu else []
        if arm == PLAIN:
            losses = str(folder / "losses.jsonl")
            starter = [str(HERE / "plain_script.py"), "--losses", losses, *device]
        else:
            mode = OFF if arm == OFF else ON
            starter = ["-m", "megatron_taco.launch", "--run-dir", str(folder / "taco"), *device]
            starter += [f"--compression.tensor_parallel.mode={mode}"]
            starter += ["--compression.tensor_parallel.min_bytes=1KiB"]
            starter += part.ours if arm == ON else ()
        steps = args.iterations
        if part is PARTS["resume"]:
            starter.append("--telemetry.error_every=0")
        flags = [*COMMON.split(), *SIZES["cpu" if args.cpu else "gpu"].split(), *self.data]
        flags += ["--data-cache-path", str(folder / "cache")]  # runs at once share no half file
        flags += ["--tensor-model-parallel-size", "2"]
        flags += ["--pipeline-model-parallel-size", str(part.stages)]
        flags += [*part.flags, *([] if args.cpu else ["--deterministic-mode"])]
        if arm in ("saved", "resumed"):
            checkpoints = str(folder / "checkpoints")
            flags += ["--save", checkpoints, "--save-interval", str(steps // 2)]
            flags += ["--load", checkpoints] if arm == "resumed" else []
            flags += ["--exit-interval", str(steps // 2)] if arm == "saved" else []
        ranks = str(2 * part.stages)
        place = ["--cpu"] if args.cpu else [] if args.own_gpus else ["--share-gpu"]
        return [
            *(sys.executable, "-m", "megatron_taco.cli", "lab", "run", "--ranks", ranks, *place),
            *("--timeout", str(args.timeout), "--", *starter),
            *(str(args.megatron_lm / "pretrain_gpt.py"), "--train-iters", str(steps), *flags),
        ]


def losses_of(folder: Path) -> dict[str, float]:
    """Loss by iteration, every bit of it."""
    plain = folder / "losses.jsonl"
    if plain.is_file():
        records = [json.loads(line) for line in plain.read_text().splitlines()]
        return {str(record["iteration"]): record["lm loss"] for record in records}
    lines = (folder / "taco" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {str(r["iteration"]): r["loss"] for r in records if r["event"] == "step"}


def flows_of(folder: Path) -> dict[str, Any]:
    """What each role sent over the whole run, or nothing."""
    metrics = folder / "taco" / "metrics.jsonl"
    if not metrics.is_file():
        return {}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    ends = [record["flows"] for record in records if record["event"] == "end"]
    return ends[-1] if ends else {}


def difference(losses: dict[str, float], plain: dict[str, float]) -> float:
    """Relative difference of the mean loss of the last steps."""
    last = list(plain)[-LAST:]
    reference = sum(plain[step] for step in last)
    return (sum(losses[step] for step in last) - reference) / reference


def judge(name: str, records: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """What has to hold for a part, and whether it does."""
    part = PARTS[name]
    found = []
    flows = records[ON]["flows"]
    for role in ("tp.forward", "tp.backward", *(["pp."] if part.ours else [])):
        compressed = sum(f["compressed"] for key, f in flows.items() if key.startswith(role))
        found.append((f"{role.rstrip('.')} compressed {compressed} times", compressed > 0))
    if PLAIN in part.arms and not part.ours:
        relative = difference(records[ON]["losses"], records[PLAIN]["losses"])
        found.append((f"loss of the last {LAST} steps {relative:+.3%}", abs(relative) <= BOUND))
    if OFF in part.arms:
        same = records[OFF]["losses"] == records[PLAIN]["losses"]
        found.append((f"off {'equals' if same else 'differs from'} the script without us", same))
    if name == "resume":
        whole, resumed = records[ON]["losses"], records["resumed"]["losses"]
        same = list(resumed) == list(whole) and resumed == whole
        found.append((f"resumed {'equals' if same else 'differs from'} unbroken", same))
    return found


def about(args: argparse.Namespace) -> str:
    """What was run, and where."""
    found = environment()
    own = args.own_gpus and not args.cpu
    shared = "Ranks share the device; NCCL or gloo over loopback."
    place = "A GPU for each rank, NCCL." if own else shared
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{', '.join(found['gpus']) or platform.processor() or 'CPU'}, {versions}, "
        f"Python {platform.python_version()}. {place} "
        f"{args.at_once} run(s) at once, {args.iterations} steps, BF16, "
        f"`{SIZES['cpu' if args.cpu else 'gpu']}`; text is Python's standard library as bytes, one "
        "seed."
    )


def compared(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table, a row a run."""
    rows = []
    for name, result in results.items():
        for arm, record in result["records"].items():
            losses = list(record["losses"].values())
            compressed = {k: f for k, f in record["flows"].items() if f["compressed"]}
            raw = sum(f["raw_bytes"] for f in compressed.values())
            wire = sum(f["wire_bytes"] for f in compressed.values())
            calls = ", ".join(f"{key} {f['compressed']}" for key, f in compressed.items())
            ratio = f"{wire / raw:.3f}" if raw else ""
            seconds = f"{record['seconds']:.0f}"
            rows.append([PARTS[name].title, arm, f"{losses[-1]:.5f}", ratio, calls, seconds])
    return ["script and flags", "run", "last loss", "sent / plain", "compressed calls", "s"], rows


def notes(results: dict[str, Any], left_out: list[str]) -> list[str]:
    """What was checked, and what was not run."""
    lines = [
        f"- {PARTS[name].title}: {text}{'' if ok else ': **this has to change**'}"
        for name, result in results.items()
        for text, ok in result["checks"]
    ]
    return [*lines, *(f"- not run: {text}" for text in left_out)]


def report(args: argparse.Namespace, results: dict[str, Any], left_out: list[str]) -> str:
    """The report as Markdown."""
    lines = ["## Megatron-LM's pretrain_gpt.py, not edited", "", about(args), ""]
    lines += [*markdown_table(*compared(results)), "", *notes(results, left_out)]
    return "\n".join(lines) + "\n"


def table(args: argparse.Namespace, results: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """The report for a list of parts."""
    head, rows = compared(results)
    said = "\n".join(notes(results, left_out))
    return {
        "benchmark": "table",
        "about": {"text": about(args)},
        "tables": [{"head": head, "rows": rows, "notes": [said]}],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron-lm", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--parts", type=words(tuple(PARTS)), default=",".join(PARTS))
    parser.add_argument("--cpu", action="store_true", help="tiny, over gloo, without a GPU")
    parser.add_argument("--own-gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=1, help="runs of a part that share the GPU")
    parser.add_argument("--runs", type=Path, default=Path("runs/one-gpu-drop-in"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so many")
    parser.add_argument("--timeout", type=float, default=500, help="seconds of one run")
    parser.add_argument("--out", type=Path, help="also write the Markdown there")
    parser.add_argument("--json", type=Path, help="write the table there; checks are only told")
    args = parser.parse_args()
    if not (args.megatron_lm / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron-lm {args.megatron_lm}: no pretrain_gpt.py there")
    # A signal ends the launcher of the ranks with this program.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    runs = Runs(args)
    has_te = not args.cpu and util.find_spec("transformer_engine") is not None
    results: dict[str, Any] = {}
    left_out = []
    for name in args.parts:
        part = PARTS[name]
        if part.te and not has_te:
            why = "it needs a GPU" if args.cpu else "Transformer Engine is not installed"
            left_out.append(f"{part.title}: {why}")
            continue
        records = runs.all_of(name)
        results[name] = {"records": records, "checks": judge(name, records)}
        text = report(args, results, left_out)
        if args.out:
            args.out.write_text(text)
    text = report(args, results, left_out)
    print(text)
    if args.out:
        args.out.write_text(text)
    if args.json:
        if not results:
            sys.exit(f"nothing was run: {'; '.join(left_out)}")
        args.json.write_text(json.dumps(table(args, results, left_out)) + "\n")
        runs.forget()
        return 0
    return 0 if all(ok for result in results.values() for _, ok in result["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
