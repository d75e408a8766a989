"""Speed on one GPU: kernels, collectives and training steps on emulated links, and losses.

Steps with each parallel axis compressed: tensor, pipeline, data. Each part takes under 5 minutes.

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
FEW = ("--cycles", "2", "--steps", "1", "--settle", "0")
"""For steps of ten seconds and more."""
PIPELINE_AIM = (
    "0.95 of the limit, and 2.4 times as fast (1 x 4) or 2.7 (1 x 32) at 1 Gbit/s, 5 (1 x 32) at "
    "200 Mbit/s; a boundary's own work at most 3% of a stage's compute"
)
DATA_AIM = "0.95 of the limit, and 2 times as fast at 10 Gbit/s with gradients in FP32"


def _pipeline(rate: str, micro_batches: int, *turns: str) -> tuple[str, ...]:
    batch = ("megatron.micro_batch_size=1", f"megatron.global_batch_size={micro_batches}")
    return (*BENCH, "step", *batch, "--axis", "pipeline", *turns, *SHARED, "--rate", rate)


def _data(rate: str, *words: str) -> tuple[str, ...]:
    return (*BENCH, "step", *words, "--axis", "data", *SHARED, "--rate", rate)


PARTS = (
    Part(
        name="kernels",
        title="Kernels",
        command=(*BENCH, "kernels"),
        aim="85% of the copy for E4M3 and INT8, 70% for INT6 and INT4",
    ),
    Part(
        name="kernels-merged",
        title="Kernels with merged scales",
        command=(*BENCH, "kernels", "--scales", "merged_bf16"),
        aim="as with dual scales",
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
        name="pipeline-1gbit-4",
        title="Pipeline at 1 Gbit/s, 4 micro-batches",
        command=_pipeline("1Gbit", 4, *STEPS),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="pipeline-1gbit-32",
        title="Pipeline at 1 Gbit/s, 32 micro-batches",
        command=_pipeline("1Gbit", 32, *STEPS),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="pipeline-200mbit-4",
        title="Pipeline at 200 Mbit/s, 4 micro-batches",
        command=_pipeline("200Mbit", 4, *FEW, "--uncompressed", "sdpa"),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="pipeline-200mbit-32",
        title="Pipeline at 200 Mbit/s, 32 micro-batches",
        # A plain step is about 20 s: Transformer Engine's would say no more.
        command=_pipeline("200Mbit", 32, *FEW, "--uncompressed", "sdpa"),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="data-10gbit",
        title="Data parallelism at 10 Gbit/s, global batch 16",
        command=_data("10Gbit", *STEPS),
        aim=DATA_AIM,
    ),
    Part(
        name="data-10gbit-bf16",
        title="Data parallelism at 10 Gbit/s, gradients reduced in BF16",
        command=_data("10Gbit", "megatron.grad_reduce_in_bf16=true", *STEPS),
        aim=DATA_AIM,
    ),
    Part(
        name="data-10gbit-256",
        title="Data parallelism at 10 Gbit/s, global batch 256",
        command=_data(
            *("10Gbit", "megatron.global_batch_size=256", "--compressors", "sdp4bit"),
            *(*FEW, "--uncompressed", "sdpa"),
        ),
        aim="0.95 of the limit",
    ),
    Part(
        name="data-1gbit",
        title="Data parallelism at 1 Gbit/s, global batch 16",
        command=_data("1Gbit", *FEW),
        aim=DATA_AIM,
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
