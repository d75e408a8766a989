"""Speed on two GPUs of one host: NVLink, host memory, and emulated links of 25, 10 and 1 Gbit/s.

A rank a GPU; the links need root (docs/lab.md). Each part is one command of under nine minutes; one
that is there already is not run again. MEGATRON is the folder of a Megatron-LM checkout, for the
parts that run its pretrain_gpt.py.

    scripts/reproduce/two_gpus.sh --list
    scripts/reproduce/two_gpus.sh --parts collectives-nvlink,step-nvlink
    scripts/reproduce/two_gpus.sh --small              # on CPUs, over gloo
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from several_parts import (
    HOST_MEMORY,
    LOOPBACK,
    NVLINK,
    RESULTS,
    Link,
    collectives,
    peer_reads,
    rate,
    step,
)

from megatron_taco.lab.part import Part
from megatron_taco.lab.results import main

HEADING = "# Two GPUs"
LINKS = (NVLINK, HOST_MEMORY, rate("25"), rate("10"), rate("1"))
SIZES = ("--sizes", "1MiB,16MiB,128MiB")
TINY = ("model.num_layers=2", "model.max_position_embeddings=64")
DROP_IN = str(Path(__file__).with_name("one_gpu_drop_in.py"))
LOSSES = str(Path(__file__).with_name("axes_losses.py"))
OF_LIMIT = "0.95 of the limit"
TENSOR, PIPELINE, DATA = "tensor", "pipeline", "data"

COLLECTIVE_AIMS = {
    "nvlink": "128 MiB 1.25 times as fast over NCCL's transport",
    "host-memory": "128 MiB 1.8 times as fast with E4M3 and 3 with INT4, 16 MiB 1.5",
    "25gbit": "128 MiB 1.85 times as fast with E4M3",
    "10gbit": "128 MiB 1.9 times as fast with E4M3, 2.5 with INT6, 3.5 with INT4",
    "1gbit": "as at 10 Gbit/s",
}
SMALL_BATCH = ("megatron.micro_batch_size=1", "megatron.global_batch_size=1")
FEW = ("--cycles", "3", "--steps", "1")
"""On slow links: a step takes seconds."""
FEWEST = ("--cycles", "2", "--steps", "1", "--settle", "0")


def all_reduces() -> Iterator[Part]:
    for link in LINKS:
        yield of_a_host(
            link,
            collectives(
                2,
                link,
                f"collectives-{link.name}",
                "All-reduce",
                ("--operations", "all_reduce", *SIZES, "--repeats", "4"),
                aim=COLLECTIVE_AIMS[link.name],
            ),
        )
        if link is NVLINK:
            aim = "128 MiB 1.6 times as fast by `peer_read`, at best 1.9"
            yield peer_reads(2, sizes=SIZES[1], aim=aim)


def of_a_host(link: Link, part: Part) -> Part:
    """On CPUs NVLink and host memory would be the same run twice."""
    return replace(part, small=(), no_small=LOOPBACK) if link is HOST_MEMORY else part


def tensor_steps() -> Iterator[Part]:
    for link in LINKS:
        formats = "e4m3,auto" if link is NVLINK else "e4m3,int8,int6,int4"
        aim = "never below 0.99 with `auto`" if link is NVLINK else OF_LIMIT
        few = (*SMALL_BATCH, *FEW) if link.name == "1gbit" else ()
        yield of_a_host(
            link,
            step(
                2,
                link,
                f"step-{link.name}",
                "Training step, TP 2,",
                ("--axis", TENSOR, "--formats", formats),
                more=few,
                small=(*TINY, "megatron.global_batch_size=4"),
                small_title="Training step of a tiny GPT, TP 2,",
                aim=aim,
            ),
        )


def pipeline_steps() -> Iterator[Part]:
    """Micro-batches of one sequence; few and many of them on the slow links."""
    work = "a boundary's own work at most 3% of a stage's compute"
    boundaries = "mapl,mapl+int8,int8_hadamard"
    slow = "mapl,mapl+int8"
    for link, batch, chosen, few, aim in (
        (NVLINK, 4, boundaries, (), work),
        (HOST_MEMORY, 4, boundaries, (), work),
        (rate("25"), 4, boundaries, (), OF_LIMIT),
        (rate("10"), 4, boundaries, (), OF_LIMIT),
        (rate("1"), 4, slow, FEW, f"{OF_LIMIT}, and 2.4 times as fast as plain"),
        (rate("1"), 32, slow, FEWEST, f"{OF_LIMIT}, and 2.7 times as fast as plain"),
        (rate("200", "Mbit"), 4, slow, FEWEST, OF_LIMIT),
        (
            rate("200", "Mbit"),
            32,
            "mapl",
            FEWEST,
            f"{OF_LIMIT}, and 5 times as fast as plain",
        ),
    ):
        sizes = ("megatron.micro_batch_size=1", f"megatron.global_batch_size={batch}")
        yield of_a_host(
            link,
            step(
                2,
                link,
                f"pipeline-{link.name}-{batch}",
                f"Training step, PP 2, micro-batches 1 × {batch},",
                ("--axis", PIPELINE, "--boundaries", chosen, *sizes),
                more=few,
                small=TINY,
                small_title=f"Training step of a tiny GPT, PP 2, micro-batches 1 × {batch},",
                aim=aim,
            ),
        )


def data_steps() -> Iterator[Part]:
    for link in LINKS:
        aims = {"10gbit": f"{OF_LIMIT}, and twice as fast as plain", "1gbit": OF_LIMIT}
        few = {"10gbit": FEW, "1gbit": FEWEST}.get(link.name, ())
        yield of_a_host(
            link,
            step(
                2,
                link,
                f"data-{link.name}",
                "Training step of GPT-350M, DP 2,",
                ("--axis", DATA, "--compressors", "sdp4bit,e4m3,block_int4"),
                more=few,
                small=TINY,
                small_title="Training step of a tiny GPT, DP 2,",
                aim=aims.get(link.name, ""),
            ),
        )
    yield step(
        2,
        rate("10"),
        "data-10gbit-bf16",
        "Training step of GPT-350M, DP 2, gradients in BF16,",
        ("--axis", DATA, "--compressors", "sdp4bit", "megatron.grad_reduce_in_bf16=true"),
        more=FEW,
        small=TINY,
        small_title="Training step of a tiny GPT, DP 2, gradients in BF16,",
    )


def transformer_engine() -> Iterator[Part]:
    """Its layers make their own collectives, which our hooks take over."""
    for name, words, more in (
        ("transformer-engine", "", ()),
        (
            "transformer-engine-sp",
            " with sequence parallelism",
            ("megatron.sequence_parallel=true",),
        ),
    ):
        yield Part(
            name=name,
            title=f"Losses with Transformer Engine's layers over 50 steps, TP 2{words}",
            command=(
                *(LOSSES, "--ranks", "2", "--steps", "50", "--arms", "tensor"),
                *("megatron.tensor_model_parallel_size=2", "model.attention=megatron"),
                "megatron.transformer_impl=transformer_engine",
                *("megatron.micro_batch_size=4", "megatron.global_batch_size=8", *more),
            ),
            environment=dict(NVLINK.environment),
            aim="within 0.5% of the uncompressed run, every role compressed",
            gpus=2,
            no_small="Transformer Engine needs CUDA",
        )


def drop_in() -> Iterator[Part]:
    """Megatron-LM's own script; the folder of its checkout is MEGATRON, as for examples/."""
    small = ("--cpu", "--iterations", "20", "--runs", "runs/two-gpus-small")
    local, layers = "Megatron's local layers", "Transformer Engine's layers"
    for name, words in (
        ("local", local),
        ("te", layers),
        ("te-sp", f"{layers} and sequence parallelism"),
        ("mixed", "Transformer Engine's attention and norms"),
    ):
        script = (DROP_IN, "--megatron-lm", os.environ.get("MEGATRON", "Megatron-LM"))
        common = (*script, "--parts", name)
        yield Part(
            name=f"drop-in-{name}",
            title=f"pretrain_gpt.py, not edited, with {words}",
            command=(*common, "--own-gpus", "--runs", "runs/two-gpus"),
            aim="loss within 0.5% over 50 steps, every role compressed, `off` equal in all bits",
            environment=dict(NVLINK.environment),
            gpus=2,
            small=(*common, *small) if name == "local" else (),
            no_small="" if name == "local" else "Transformer Engine needs CUDA",
        )


PARTS = (
    *all_reduces(),
    *tensor_steps(),
    *pipeline_steps(),
    *data_steps(),
    *transformer_engine(),
    *drop_in(),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, RESULTS / "two-gpus.md", __doc__, heading=HEADING))
