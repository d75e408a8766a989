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
import datetime
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
from megatron_taco.config import Config, load
from megatron_taco.data import DataError
from megatron_taco.lab import results_page, study
from megatron_taco.lab.corpus import Recipe, installed_roots
from megatron_taco.lab.corpus_tokens import Prepared, prepare
from megatron_taco.lab.plot_file import plot_file
from megatron_taco.lab.study_runs import StudyRuns
from megatron_taco.training.run_folder import published_environment

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "llama-150m.yaml"
SECTION = "compression.pipeline_parallel"
UNCOMPRESSED, MAPL = "uncompressed", "mapl"
CALIBRATION_STEPS = 30
VALIDATIONS = 5


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
)


class Study:
    """The settings of a study, its runs, and its page.

    Args:
        args: Of the command line.
        corpus: What is trained on.
        seconds: Of all runs, or None.
    """

    def __init__(self, args: argparse.Namespace, corpus: Prepared, seconds: float | None) -> None:
        self.args, self.corpus = args, corpus
        self.shape = SMALL if args.small else WHOLE
        self.folder: Path = args.page.with_suffix("")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.runs = StudyRuns(
            CONFIG,
            self.overrides,
            folder=self.folder,
            runs=args.runs,
            seconds=seconds,
            cpu=args.small,
        )
        self.facts = self._facts()

    def _facts(self) -> dict[str, Any]:
        """What all runs have in common; of an earlier call if there was one."""
        file = self.folder / "study.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        steps = self.args.steps or found.get("steps")
        if steps is None:
            print(f"measuring {CALIBRATION_STEPS} steps", flush=True)
            each = self.runs.step_seconds(MAPL, CALIBRATION_STEPS)
            steps = max(2 * CALIBRATION_STEPS, int(self.args.seconds_per_arm / (1.1 * each)))
        here = {"steps": steps, "shape": self.shape.name, "corpus": self.corpus.digest}
        for key, value in here.items():
            if found.get(key, value) != value:
                sys.exit(
                    f"{file}: {key} is {found[key]!r} there and {value!r} here; arms have to see "
                    "the same tokens: name another --page, or remove that folder"
                )
        if not found:
            small = " --small" if self.args.small else ""
            command = f"python scripts/reproduce/mapl_accuracy.py{small} --steps {steps}"
            date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
            run = {"command": command, "date": date, "commit": self.args.commit}
            found = {**here, "environment": published_environment(), "run": run}
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return found

    def run(self) -> int:
        """Make the runs that are missing; returns an exit code."""
        return self.runs.run(self.args.arms, self.args.seeds, self.facts["steps"])

    def overrides(self, arm: str, seed: int, steps: int) -> list[str]:
        """The trainer's settings of a run, but where it saves."""
        found = [*COMMON, *self.corpus.overrides(), *self.shape.overrides]
        found += [f"megatron.seed={seed}", f"megatron.train_iters={steps}"]
        found += [f"megatron.eval_iters={self.shape.eval_iters}"]
        found += [f"megatron.eval_interval={steps // VALIDATIONS + 1}"]  # and at the end
        if ARMS[arm]:
            settings = {"rank": self.shape.rank, "seed": seed, **ARMS[arm]}
            found += [f"{SECTION}.mode=on", f"{SECTION}.after_layers={list(self.shape.depths)}"]
            found += [f"{SECTION}.{key}={value}" for key, value in leaves(settings)]
            if "rvq" in str(settings):
                warmup = f"{SECTION}.quantizer.forward.warmup_steps"
                found.append(f"{warmup}={self.shape.warmup_steps}")
        return found

    def write(self) -> None:
        """Write the page's measured part, and the plot."""
        records = self.runs.records(list(ARMS))
        if not records:
            return
        base = UNCOMPRESSED if UNCOMPRESSED in records else next(iter(records))
        sent = {arm: self.sent(arm) for arm in records}
        report = {
            "benchmark": "study",
            "run": self.facts["run"],
            "about": {"text": self.describe()},
            "base": base,
            "title": self.shape.name,
            "arms": study.curves(records, base),
            "lines": [
                *study.table(records, {"bytes a token": sent}, (UNCOMPRESSED, MAPL)),
                "",
                "Bytes: of a boundary in BF16, forward / backward, without token ids (2 to 4 bytes "
                "a token where there are anchors). Losses are of the held-out packages. "
                "Unresolved: less than twice the spread of the seeds.",
                "",
                *projectors(records),
            ],
        }
        section = results_page.Section(
            name="losses", title=self.shape.name, aim="", report=report, folder=self.folder
        )
        results_page.write(self.args.page, [section])
        print("\n".join(report["lines"]), flush=True)

    def describe(self) -> str:
        """What was trained on what."""
        config = self.config(UNCOMPRESSED)
        batch, length = config.megatron["global_batch_size"], config.megatron["seq_length"]
        tokens = batch * length * self.facts["steps"]
        env = self.facts["environment"]
        return (
            f"{config.model.num_layers} layers, hidden {config.model.hidden_size}, rank "
            f"{self.shape.rank}, boundaries after layers "
            f"{', '.join(map(str, self.shape.depths))} in place, "
            f"{'BF16' if config.megatron['bf16'] else 'FP32'}; {self.facts['steps']} steps of "
            f"{batch} sequences of {length} tokens: {tokens:,} tokens, the same for every arm, "
            f"{tokens / self.corpus.tokens['train']:.2f} epochs. {self.corpus.describe()} "
            "Muon (0.02) on hidden matrices, AdamW (0.01) on the rest, cosine to a tenth after "
            f"10% warm-up. {', '.join(env['gpus']) or f'A CPU of {env["cpus"]} cores'}, torch "
            f"{env['versions']['torch']}, megatron-core {env['versions']['megatron-core']}, Python "
            f"{env['python']}."
        )

    def config(self, arm: str) -> Config:
        """The configuration of an arm."""
        return load(CONFIG, self.overrides(arm, 1, self.facts["steps"]))

    def sent(self, arm: str) -> str:
        """Bytes a token that a boundary of an arm sends each way."""
        config = self.config(arm)
        hidden, length = config.model.hidden_size or 0, config.megatron["seq_length"]
        if not ARMS[arm]:
            return f"{2 * hidden} / {2 * hidden}"
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
    parser.add_argument("--commit", default="not given", help="that is measured, for the page")
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
    start = time.monotonic()
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
        spent = time.monotonic() - start
        found = Study(args, corpus, None if args.seconds is None else args.seconds - spent)
        try:
            failed = 0 if args.page_only else found.run()
        finally:
            found.write()
    return failed


if __name__ == "__main__":
    sys.exit(main())
