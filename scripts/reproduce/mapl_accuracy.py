"""What pipeline boundaries cost in accuracy: all kinds in place on one GPU, the same tokens each.

    python scripts/reproduce/mapl_accuracy.py --seconds-per-arm 100 --seeds 1,2

The LLaMA-150M shape of MAPL (d = 1024, r = 256, boundaries as for four stages) on the text of the
packages that are installed; Muon (0.02) on hidden matrices and AdamW (0.01) on the rest in every
arm. It can be stopped at any time, by Ctrl-C or ``--seconds``: arms that are done are not run
again, and the one that was under way goes on from its checkpoint if ``--runs`` is still there.
``--small`` is the same on a CPU with a tiny shape. Needs the package
emerging-optimizers (Megatron's Muon), and tokenizers where the text has to be prepared.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_taco.boundaries import BoundarySettings, QuantizerSettings
from megatron_taco.boundaries.chain import Chain
from megatron_taco.boundaries.rvq import ResidualVQ
from megatron_taco.cli.lab_arguments import words
from megatron_taco.config import load
from megatron_taco.data import DataError
from megatron_taco.lab import study
from megatron_taco.lab.corpus import Recipe, installed_roots
from megatron_taco.lab.corpus_tokens import Prepared, prepare
from megatron_taco.lab.forked import Forked
from megatron_taco.lab.plot_file import plot_file
from megatron_taco.training.run_folder import environment

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "llama-150m.yaml"
SECTION = "compression.pipeline_parallel"
UNCOMPRESSED, MAPL = "uncompressed", "mapl"
CALIBRATION_STEPS = 30
CHECKPOINTS = 4
VALIDATIONS = 5
GRACE_S = 20.0
START_S = 20.0
"""Seconds that a run may take to save when it is stopped, and to start."""


def quantized(forward: str, **options: int) -> dict[str, Any]:
    """Settings of a quantiser after the projection, and of INT8 for its gradient."""
    return {
        "boundary": "mapl",
        "quantizer": {"forward": {"kind": forward, **options}, "backward": {"kind": "int8"}},
    }


ARMS: dict[str, dict[str, Any]] = {
    UNCOMPRESSED: {},
    MAPL: {"boundary": "mapl"},
    "mapl-rvq": quantized("rvq"),
    "mapl-int8": quantized("int8"),
    "subspace": {"boundary": "subspace"},
    "resbm": {"boundary": "residual_bottleneck"},
    "fixed": {"boundary": "fixed"},
    "no-manifold": {"boundary": "learned_unconstrained"},
    "no-anchors": {"boundary": "mapl", "anchors": "none"},
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and how it is trained.

    Attributes:
        name: For the page.
        overrides: Of configs/llama-150m.yaml.
        depths: Layers that boundaries sit after.
        rank: Coordinates that cross.
        vocab: Token ids.
        recipe: Of the corpus.
        eval_iters: Batches of a validation.
        warmup_steps: Of the residual quantiser.
    """

    name: str
    overrides: tuple[str, ...]
    depths: tuple[int, ...]
    rank: int
    vocab: int
    recipe: Recipe
    eval_iters: int
    warmup_steps: int


WHOLE = Shape(
    name="LLaMA-150M shape",
    overrides=("megatron.micro_batch_size=16", "megatron.global_batch_size=64"),
    depths=(2, 4, 6),
    rank=256,
    vocab=32_000,
    recipe=Recipe(),
    eval_iters=10,
    warmup_steps=50,
)
SMALL = Shape(
    name="tiny shape on a CPU",
    overrides=(
        *("model.num_layers=4", "model.hidden_size=128", "model.ffn_hidden_size=256"),
        *("model.num_attention_heads=4", "model.max_position_embeddings=128"),
        *("megatron.seq_length=128", "megatron.micro_batch_size=8"),
        *("megatron.global_batch_size=8", "megatron.bf16=false"),
    ),
    depths=(1, 2, 3),
    rank=32,
    vocab=1_024,
    recipe=Recipe(limit=24_000_000),
    eval_iters=12,
    warmup_steps=50,
)
COMMON = (
    *("megatron.tensor_model_parallel_size=1", "megatron.pipeline_model_parallel_size=1"),
    *("megatron.sequence_parallel=false", "megatron.use_distributed_optimizer=false"),
    *("compression.tensor_parallel.mode=off", "megatron.log_interval=1"),
    # Megatron has one lr: 0.01 of AdamW, and Muon's steps are twice as long.
    *("megatron.optimizer=muon", "megatron.lr=0.01", "megatron.muon_extra_scale_factor=2.0"),
    *("megatron.min_lr=0.001", "megatron.lr_warmup_fraction=0.1"),
    *("megatron.muon_scale_mode=shape_scaling", "megatron.muon_momentum=0.95"),
    "megatron.muon_nesterov=true",
    *("megatron.exit_signal_handler=true", "megatron.save_retain_interval=null"),
)


def train(config: str, overrides: list[str]) -> int:
    """Train, in a process of its own; at SIGTERM Megatron saves a checkpoint and ends."""
    from megatron_taco.training.run import run

    return run(config, overrides)


class Study:
    """The runs of a study, what they gave, and its page.

    Args:
        args: Of the command line.
        corpus: What is trained on.
    """

    def __init__(self, args: argparse.Namespace, corpus: Prepared) -> None:
        self.args, self.corpus = args, corpus
        self.shape = SMALL if args.small else WHOLE
        self.folder: Path = args.page.with_suffix("")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = None if args.seconds is None else time.monotonic() + args.seconds
        self._forked = Forked(cpu=args.small)
        self.facts = self._facts()

    def _facts(self) -> dict[str, Any]:
        """What all runs have in common; of an earlier call if there was one."""
        file = self.folder / "study.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        steps = self.args.steps or found.get("steps")
        if steps is None:
            steps = self._calibrate()
        here = {"steps": steps, "shape": self.shape.name, "corpus": self.corpus.digest}
        for key, value in here.items():
            if found.get(key, value) != value:
                sys.exit(
                    f"{file}: {key} is {found[key]!r} there and {value!r} here; arms have to see "
                    "the same tokens: name another --page, or remove that folder"
                )
        if not found:
            found = {**here, "environment": environment(), "about": self.corpus.describe()}
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return found

    def _calibrate(self) -> int:
        """How many steps the given time is enough for, from a short run of one arm."""
        print(f"measuring {CALIBRATION_STEPS} steps", flush=True)
        folder = self.args.runs / "calibration"
        if self._train(MAPL, 1, CALIBRATION_STEPS, folder, save=False):
            sys.exit(1)
        lines = self._lines(folder)
        times = sorted(line["step_ms"] for line in lines if line["event"] == "step")
        each = times[len(times) // 2] / 1e3
        return max(2 * CALIBRATION_STEPS, int(self.args.seconds_per_arm / (1.1 * each)))

    @property
    def left(self) -> float:
        """Seconds left."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def file(self, arm: str, seed: int) -> Path:
        """Where a finished run is kept."""
        return self.folder / f"{arm}-seed{seed}.json"

    def run(self) -> int:
        """Train what is missing; returns 0, or the exit code of the first run that failed."""
        failed = 0
        for seed in self.args.seeds:
            for arm in self.args.arms:
                if self.file(arm, seed).exists():
                    continue
                if self.left < START_S + GRACE_S:
                    print("no time left: the same command goes on from here", flush=True)
                    return failed
                folder = self.args.runs / f"{arm}-seed{seed}"
                print(f"== {arm}, seed {seed}, {self.facts['steps']} steps", flush=True)
                start = time.monotonic()
                code = self._train(arm, seed, self.facts["steps"], folder)
                if code and self.left > GRACE_S:
                    print(
                        f"== {arm} failed: see {folder / 'trainer.log.0'}",
                        file=sys.stderr,
                        flush=True,
                    )
                    failed = failed or code
                    continue
                record = study.run_record(self._lines(folder))
                if record["steps"][-1:] != [self.facts["steps"]]:
                    print(f"== {arm} stopped after step {record['steps'][-1:]}", flush=True)
                    return failed
                record["seconds"] = time.monotonic() - start
                self.file(arm, seed).write_text(json.dumps(record) + "\n", encoding="utf-8")
                self.write()
        return failed

    def _train(self, arm: str, seed: int, steps: int, folder: Path, save: bool = True) -> int:
        """Train one run, or go on with it until the time is over; returns its exit code."""
        overrides = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
        overrides += self.overrides(arm, seed, steps)
        overrides += self._saving(folder, steps) if save else ["megatron.eval_interval=null"]
        folder.mkdir(parents=True, exist_ok=True)
        (code,) = self._forked.run(
            train,
            (str(CONFIG), overrides),
            ranks=1,
            log=folder / "trainer.log",
            timeout_s=None if self.deadline is None else max(1.0, self.left - GRACE_S),
        )
        return 0 if code is None else code

    def overrides(self, arm: str, seed: int, steps: int) -> list[str]:
        """The trainer's settings of a run, but where it saves."""
        found = [*COMMON, *self.corpus.overrides(), *self.shape.overrides]
        found += [f"megatron.seed={seed}", f"megatron.train_iters={steps}"]
        found += [f"megatron.eval_iters={self.shape.eval_iters}"]
        found += [f"megatron.eval_interval={-(-steps // VALIDATIONS)}"]
        if ARMS[arm]:
            settings = {"rank": self.shape.rank, "seed": seed, **ARMS[arm]}
            found += [f"{SECTION}.mode=on", f"{SECTION}.after_layers={list(self.shape.depths)}"]
            found += [f"{SECTION}.{key}={value}" for key, value in leaves(settings)]
            if "rvq" in str(settings):
                warmup = f"{SECTION}.quantizer.forward.warmup_steps"
                found.append(f"{warmup}={self.shape.warmup_steps}")
        return found

    def _saving(self, folder: Path, steps: int) -> list[str]:
        saved = folder / "checkpoints"
        found = [f"megatron.save={saved}", f"megatron.save_interval={-(-steps // CHECKPOINTS)}"]
        if (saved / "latest_checkpointed_iteration.txt").exists():
            found.append(f"megatron.load={saved}")
        return found

    @staticmethod
    def _lines(folder: Path) -> list[dict[str, Any]]:
        file = folder / "metrics.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def records(self) -> dict[str, dict[int, dict[str, Any]]]:
        """All finished runs, by arm and seed, those of other calls included."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for arm in ARMS:
            for file in sorted(self.folder.glob(f"{arm}-seed*.json")):
                seed = int(file.stem.rpartition("-seed")[2])
                found.setdefault(arm, {})[seed] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def write(self) -> None:
        """Write the page's measured part, and the plot."""
        records = self.records()
        if not records:
            return
        config = load(CONFIG, self.overrides(UNCOMPRESSED, 1, self.facts["steps"]))
        batch = config.megatron["global_batch_size"]
        length = config.megatron["seq_length"]
        hidden = config.model.hidden_size or 0
        sent = {arm: self.sent(arm, hidden, length) for arm in records}
        tokens = batch * length * self.facts["steps"]
        env = self.facts["environment"]
        lines = [
            f"{self.shape.name}: {config.model.num_layers} layers, hidden {hidden}, rank "
            f"{self.shape.rank}, boundaries after layers "
            f"{', '.join(map(str, self.shape.depths))} in place, "
            f"{'BF16' if config.megatron['bf16'] else 'FP32'}; {self.facts['steps']} steps of "
            f"{batch} sequences of {length} tokens: {tokens:,} tokens, the same for every arm, "
            f"{tokens / self.corpus.tokens['train']:.2f} epochs. {self.facts['about']}",
            "",
            f"Muon (0.02) on hidden matrices, AdamW (0.01) on the rest, cosine to a tenth after "
            f"10% warm-up. {', '.join(env['gpus']) or env['platform']}, torch "
            f"{env['versions']['torch']}, megatron-core {env['versions']['megatron-core']}, Python "
            f"{env['python']}.",
            "",
            *study.table(records, {"bytes a token": sent}, (UNCOMPRESSED, MAPL)),
            "",
            "Bytes: of a boundary each way in BF16, forward / backward, without token ids (2 to 4 "
            "bytes a token where there are anchors). Losses are of the held-out packages. "
            "Unresolved: less than twice the spread of the seeds.",
            "",
            f"![Losses]({self.folder.name}/losses.svg)",
            "",
            *projectors(records),
        ]
        base = UNCOMPRESSED if UNCOMPRESSED in records else next(iter(records))
        study.plot(records, base, self.shape.name, self.folder / "losses.svg")
        put(self.args.page, lines)

    def sent(self, arm: str, hidden: int, length: int) -> str:
        """Bytes a token that a boundary of an arm sends each way."""
        if not ARMS[arm]:
            return f"{2 * hidden} / {2 * hidden}"
        config = load(CONFIG, self.overrides(arm, 1, self.facts["steps"]))
        axis = config.compression.pipeline_parallel
        quantizers = [
            QuantizerSettings(each.kind, each.options())
            for each in (axis.quantizer.forward, axis.quantizer.backward)
        ]
        settings = BoundarySettings(
            kind=axis.boundary,
            hidden=hidden,
            rank=axis.resolved_rank(),
            vocab=self.corpus.vocab,
            anchors=axis.resolved_anchors(),
            forward=quantizers[0],
            backward=quantizers[1],
        )
        boundary = Chain(settings, 1, 0, 1).boundary(1)
        assert boundary is not None
        if isinstance(boundary.there, ResidualVQ):
            boundary.there.codebook.step = self.shape.warmup_steps
        ways = [boundary.wire_bytes(length, 1, torch.bfloat16, backward=b) for b in (False, True)]
        return " / ".join(f"{way / length:.0f}" for way in ways)


def leaves(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """Dotted keys and values of nested settings."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += [(f"{key}.{name}", each) for name, each in leaves(value)]
        else:
            found.append((key, value))
    return found


def projectors(records: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """What learned projectors did: orthonormality, repairs, how far they moved."""
    lines = []
    for arm, runs in records.items():
        moved = [angle["median"] for run in runs.values() for angle in run["angles"].values()]
        worst = max((run["orthonormality"] or 0.0 for run in runs.values()), default=0.0)
        if moved:
            repairs = sum(run["repairs"] for run in runs.values())
            lines.append(
                f"{arm}: projectors turned by {min(moved):.1f} to {max(moved):.1f} degrees (median "
                f"principal angle of a boundary), max |A'A − I| {worst:.1e}, {repairs:.0f} repairs."
            )
    return lines


def put(page: Path, lines: list[str]) -> None:
    """Write lines into a page between two comments; what is outside of them stays."""
    start, end = "<!-- measured -->", "<!-- end -->"
    block = "\n".join([start, *lines, end])
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if start in text and end in text:
        text = text.partition(start)[0] + block + text.partition(end)[2]
    else:
        text = f"{text or '# Accuracy of pipeline boundaries'}\n\n{block}\n".lstrip()
    page.write_text(text, encoding="utf-8")


def numbers(text: str) -> list[int]:
    """Parse a list of seeds."""
    return [int(each) for each in text.split(",")]


def main() -> int:
    """Prepare, train what is missing, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny shape, on a CPU")
    parser.add_argument("--arms", type=words(tuple(ARMS)), default=list(ARMS), metavar="LIST")
    parser.add_argument("--seeds", type=numbers, default=[1], metavar="LIST")
    parser.add_argument("--steps", type=int, help="of every run")
    parser.add_argument("--seconds-per-arm", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, help="of this call, all in all")
    parser.add_argument("--data", type=Path, help="folder of the corpus, made if missing")
    parser.add_argument("--runs", type=Path, help="folder of run folders and checkpoints")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    parser.add_argument("--prepare-only", action="store_true", help="make the corpus alone")
    args = parser.parse_args()
    suffix = "-small" if args.small else ""
    args.data = args.data or ROOT / ".cache" / f"installed-packages{suffix}"
    args.runs = args.runs or ROOT / "runs" / f"mapl-accuracy{suffix}"
    args.page = args.page or ROOT / "docs" / "results" / f"mapl-accuracy{suffix}.md"
    try:
        plot_file("losses.svg")  # a missing matplotlib is found out before anything runs
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    shape = SMALL if args.small else WHOLE
    try:
        corpus = prepare(args.data, installed_roots(), shape.recipe, shape.vocab)
    except DataError as error:
        parser.error(str(error))
    print(corpus.describe(), flush=True)
    if args.prepare_only:
        return 0
    if importlib.util.find_spec("emerging_optimizers") is None and not args.page_only:
        parser.error("Muon needs the package emerging-optimizers: pip install emerging-optimizers")
    failed = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        found = Study(args, corpus)
        if not args.page_only:
            failed = found.run()
        found.write()
    return failed


if __name__ == "__main__":
    sys.exit(main())
