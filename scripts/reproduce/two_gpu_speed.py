"""Speed on two GPUs of one host: NVLink, host memory, and emulated links of 25, 10 and 1 Gbit/s.

A rank a GPU; the links need root (docs/lab.md). Each part is one aim. Writes
docs/results/two-gpu-speed with JSON and plots, and docs/results/two-gpu-speed.md. A part that is
there already is not run again.

    python scripts/reproduce/two_gpu_speed.py --parts collectives-nvlink
    python scripts/reproduce/two_gpu_speed.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_taco.lab.results import Part, main

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ("-m", "megatron_taco.cli", "bench")
ALL_REDUCE = ("collectives", "--operations", "all_reduce", "--sizes", "16MiB,128MiB")
NVLINK = ("--ranks", "2")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
HOST_MEMORY = {"NCCL_P2P_DISABLE": "1"}
STEP_AIM = "0.95 of the limit"


def _rate(rate: str) -> tuple[str, ...]:
    return ("--hosts", "2", "--rate", rate)


PIPELINE = (*BENCH, "step", "megatron.global_batch_size=32", "--axis", "pipeline")
"""32 micro-batches of one sequence, between two stages."""
PIPELINE_AIM = (
    "0.95 of the limit, and 2.7 times as fast at 1 Gbit/s; a boundary's own work at most 3% of a "
    "stage's compute"
)
DATA = (*BENCH, "step", "--axis", "data")
DATA_AIM = "0.95 of the limit, and 2 times as fast at 10 Gbit/s"
FEW = ("--cycles", "2", "--steps", "1")


PARTS = (
    Part(
        name="collectives-nvlink",
        title="All-reduce over NVLink",
        command=(*BENCH, *ALL_REDUCE, *NVLINK),
        aim="128 MiB 1.25 times as fast over NCCL's transport",
    ),
    Part(
        name="collectives-peer-read",
        title="All-reduce over NVLink by direct peer reads",
        command=(*BENCH, *ALL_REDUCE, *NVLINK, "--algorithms", "one_shot,peer_read"),
        environment=NO_MULTICAST,
        aim="128 MiB 1.6 times as fast by `peer_read`, at best 1.9",
    ),
    Part(
        name="collectives-host-memory",
        title="All-reduce through host memory",
        command=(*BENCH, *ALL_REDUCE, *NVLINK),
        environment=HOST_MEMORY,
        aim="128 MiB 1.8 times as fast with E4M3 and 3 with INT4, 16 MiB 1.5",
    ),
    Part(
        name="collectives-25gbit",
        title="All-reduce at 25 Gbit/s",
        command=(*BENCH, *ALL_REDUCE, *_rate("25Gbit")),
        aim="128 MiB 1.85 times as fast with E4M3",
    ),
    Part(
        name="step-nvlink",
        title="Training step over NVLink",
        command=(*BENCH, "step", *NVLINK, "--formats", "e4m3,auto"),
        aim="never below 0.99 with `auto`",
    ),
    Part(
        name="step-host-memory",
        title="Training step through host memory",
        command=(*BENCH, "step", *NVLINK),
        environment=HOST_MEMORY,
        aim=STEP_AIM,
    ),
    Part(
        name="step-25gbit",
        title="Training step at 25 Gbit/s",
        command=(*BENCH, "step", *_rate("25Gbit")),
        aim=STEP_AIM,
    ),
    Part(
        name="step-10gbit",
        title="Training step at 10 Gbit/s",
        command=(*BENCH, "step", *_rate("10Gbit")),
        aim=STEP_AIM,
    ),
    Part(
        name="pipeline-host-memory",
        title="Pipeline through host memory",
        command=(*PIPELINE, *NVLINK),
        environment=HOST_MEMORY,
        aim=PIPELINE_AIM,
    ),
    Part(
        name="pipeline-25gbit",
        title="Pipeline at 25 Gbit/s",
        command=(*PIPELINE, *_rate("25Gbit")),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="pipeline-10gbit",
        title="Pipeline at 10 Gbit/s",
        command=(*PIPELINE, *_rate("10Gbit")),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="pipeline-1gbit",
        title="Pipeline at 1 Gbit/s",
        command=(*PIPELINE, *FEW, *_rate("1Gbit")),
        aim=PIPELINE_AIM,
    ),
    Part(
        name="data-host-memory",
        title="Data parallelism through host memory",
        command=(*DATA, *NVLINK),
        environment=HOST_MEMORY,
        aim=DATA_AIM,
    ),
    Part(
        name="data-25gbit",
        title="Data parallelism at 25 Gbit/s",
        command=(*DATA, *_rate("25Gbit")),
        aim=DATA_AIM,
    ),
    Part(
        name="data-10gbit",
        title="Data parallelism at 10 Gbit/s",
        command=(*DATA, *_rate("10Gbit")),
        aim=DATA_AIM,
    ),
    Part(
        name="data-1gbit",
        title="Data parallelism at 1 Gbit/s",
        command=(*DATA, *FEW, *_rate("1Gbit")),
        aim=DATA_AIM,
    ),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, ROOT / "docs" / "results" / "two-gpu-speed.md", __doc__))
