"""Train the demo model twice, uncompressed and with TACO, and print the two side by side.

Both runs are ordinary runs of the trainer, over four processes on this machine: tensor parallel 2 ×
pipeline parallel 2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "demo-cpu.yaml"
RUNS = ROOT / "runs"
PROCESSES = 4


def train(name: str, *overrides: str) -> float:
    """Run the trainer; returns its wall time in seconds."""
    command = [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)),
        *("-m", "megatron_taco.pretrain", "--config", str(CONFIG)),
        *(f"run.dir={RUNS}", f"run.name={name}", *overrides),
    ]
    print("$", " ".join(command), flush=True)
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    result = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if result.returncode:
        sys.exit(f"the run {name} failed; Megatron's own output is in {RUNS / name / 'logs'}")
    return time.perf_counter() - start


def records(name: str) -> list[dict[str, Any]]:
    """The run's metrics, a dictionary a line."""
    text = (RUNS / name / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Train, compare, print."""
    names = {"uncompressed": "demo-uncompressed", "TACO": "demo"}
    seconds = {
        "uncompressed": train(names["uncompressed"], "compression.tensor_parallel.mode=off"),
        "TACO": train(names["TACO"]),
    }
    table = Table(title="The same model, data and steps", title_justify="left")
    table.add_column("")
    for label in names:
        table.add_column(label, justify="right")
    runs = {label: records(name) for label, name in names.items()}
    losses: dict[str, list[float]] = {}
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    for label, lines in runs.items():
        losses[label] = [line["loss"] for line in lines if line["event"] == "validation"]
    steps = [line["iteration"] for line in runs["TACO"] if line["event"] == "validation"]
    for label, lines in runs.items():
        training = [line["loss"] for line in lines if line["event"] == "step"]
        firsts[label], lasts[label] = training[0], training[-1]
    table.add_row("training loss, first step", *(f"{firsts[label]:.4f}" for label in names))
    for index, step in enumerate(steps):
        table.add_row(
            "final validation loss"
            if index == len(steps) - 1
            else f"validation loss after step {step}",
            *(f"{losses[label][index]:.4f}" for label in names),
        )
    table.add_row("training loss, last step", *(f"{lasts[label]:.4f}" for label in names))
    table.add_row("seconds, start-up included", *(f"{seconds[label]:.0f}" for label in names))
    end = next(line for line in runs["TACO"] if line["event"] == "end")
    flows = [flow for flow in end["flows"].values() if flow["compressed"]]
    raw = sum(flow["raw_bytes"] for flow in flows)
    wire = sum(flow["wire_bytes"] for flow in flows)
    mib = 1 << 20
    table.add_row("compressed roles, MiB sent", f"{raw / mib:.1f}", f"{wire / mib:.1f}")
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(table)
    last = {label: losses[label][-1] for label in names}
    difference = last["TACO"] / last["uncompressed"] - 1
    console.print(
        f"The loss fell by {firsts['TACO'] - last['TACO']:.2f} nats. "
        f"Saved {1 - wire / raw:.1%} of the bytes of the compressed roles; "
        f"final validation loss {difference:+.2%} against uncompressed."
    )
    console.print("What the compressed run left:")
    for path in sorted((RUNS / names["TACO"]).glob("[!.]*")):
        console.print(f"  {path.relative_to(ROOT)}{'/' if path.is_dir() else ''}")


if __name__ == "__main__":
    main()
