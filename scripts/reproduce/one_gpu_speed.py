"""Speed on one GPU: kernels, collectives and training steps on emulated links, and losses.

Two NCCL ranks share the card; the links need root (docs/lab.md). Writes docs/results/one-gpu-speed
with JSON and plots, and docs/results/one-gpu-speed.md. A part that is there already is not run
again.

    python scripts/reproduce/one_gpu_speed.py
    python scripts/reproduce/one_gpu_speed.py --parts step-10gbit,step-1gbit --again
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_taco.lab.results import Part, main

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ("-m", "megatron_taco.cli", "bench")
SHARED = ("--hosts", "2", "--share-gpu")
STEP_AIM = "0.95 of the limit"
STEPS = ("--cycles", "3", "--steps", "1")

PARTS = (
    Part(
        name="kernels",
        title="Kernels",
        command=(*BENCH, "kernels"),
        aim="85% of the copy for E4M3 and INT8, 70% for INT6 and INT4",
    ),
    Part(
        name="collectives-10gbit",
        title="Collectives at 10 Gbit/s",
        command=(
            *(*BENCH, "collectives", *SHARED, "--rate", "10Gbit", "--sizes", "16MiB,128MiB"),
            *("--repeats", "4"),
        ),
        aim="all-reduce of 128 MiB 1.9 times as fast with E4M3, 2.5 with INT6, 3.5 with INT4",
    ),
    Part(
        name="collectives-1gbit",
        title="Collectives at 1 Gbit/s",
        command=(
            *(*BENCH, "collectives", *SHARED, "--rate", "1Gbit", "--sizes", "16MiB,128MiB"),
            *("--operations", "all_reduce", "--repeats", "3"),
        ),
        aim="as at 10 Gbit/s",
    ),
    Part(
        name="step-10gbit",
        title="Training step at 10 Gbit/s",
        command=(*BENCH, "step", *STEPS, *SHARED, "--rate", "10Gbit"),
        aim=STEP_AIM,
    ),
    Part(
        name="step-1gbit",
        title="Training step at 1 Gbit/s",
        # Ten times as long a step otherwise; ratios are what counts.
        command=(
            *(*BENCH, "step", "megatron.micro_batch_size=1", "megatron.global_batch_size=1"),
            *(*STEPS, *SHARED, "--rate", "1Gbit"),
        ),
        aim=STEP_AIM,
    ),
    Part(
        name="losses",
        title="Losses over 200 steps",
        command=(
            *(str(Path(__file__).with_name("one_gpu_training.py")), "--model", "small"),
            *("--steps", "200", "--layouts", "tp2", "--formats", "e4m3,int8,int6,int4"),
            *("--at-once", "5"),
        ),
        aim="within 0.5% of the uncompressed run for E4M3, INT8 and INT6",
    ),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, ROOT / "docs" / "results" / "one-gpu-speed.md", __doc__))
