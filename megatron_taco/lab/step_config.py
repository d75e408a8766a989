"""The configuration that ``bench step`` trains with: the reference model, or the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatron_taco.config.canonical import to_yaml
from megatron_taco.lab.link import LabError
from megatron_taco.lab.step_arms import ALL, DATA, PIPELINE, TENSOR, world_size
from megatron_taco.lab.step_schedule import AUTO, FP32

UNCOMPRESSED: Final[dict[str, tuple[str, ...]]] = {
    "sdpa": (),
    "megatron": ("model.attention=megatron",),
    "transformer_engine": (
        "model.attention=megatron",
        "megatron.transformer_impl=transformer_engine",
    ),
}
"""Uncompressed configurations: torch's attention and norms in Megatron's local layers, which is
what compression runs with; Megatron's own unfused local layers; Transformer Engine."""

_BATCHES: Final = {TENSOR: (4, 8), PIPELINE: (1, 4), DATA: (8, 16), ALL: (1, 8)}
"""Micro-batch and global batch of each axis."""


def write(folder: Path, axis: str, *, gpu: bool) -> Path:
    """Writes the benchmark's own configuration for an axis, with that axis over all ranks.

    On GPUs it is the reference model (8 layers, hidden 2048, 16 heads, vocabulary 32,000, sequence
    2048), for data parallelism GPT-350M; on CPUs a tiny one. Across pipeline stages the embedding
    is not tied: Megatron would send the gradient of the whole table at the end of each step.

    Args:
        folder: Where to.
        axis: One of ``AXES``.
        gpu: Whether this rank has a GPU.

    Raises:
        LabError: ``all`` with a number of ranks that 2 x 2 does not divide.
    """
    world = world_size()
    if axis == ALL and world % 4:
        raise LabError(
            f"--axis all without --config is tensor 2 x pipeline 2 x the rest, found {world} "
            "ranks; allowed: a multiple of 4"
        )
    preset, vocabulary = "gpt-tiny", 256
    if gpu:
        preset, vocabulary = ("gpt-350m", 50257) if axis == DATA else ("gpt-reference", 32000)
    sizes = {TENSOR: (world, 1), PIPELINE: (1, world), DATA: (1, 1), ALL: (2, 2)}[axis]
    model: dict[str, Any] = {"preset": preset}
    if axis in (PIPELINE, ALL):
        model["untie_embeddings_and_output_weights"] = True
    small = {} if gpu else {"min_bytes": "4KiB"}
    tree = {
        "data": {"source": "mock", "tokenizer": {"null": vocabulary}},
        "model": model,
        "megatron": {
            "tensor_model_parallel_size": sizes[0],
            "pipeline_model_parallel_size": sizes[1],
            "use_distributed_optimizer": axis in (DATA, ALL),
            "micro_batch_size": _BATCHES[axis][0],
            "global_batch_size": _BATCHES[axis][1],
            "bf16": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "compression": {
            "tensor_parallel": small,
            "data_parallel": {**small, "weights": {"compressor": "sdp4bit"}},
        },
    }
    path = folder / f"{preset}.yaml"
    path.write_text(to_yaml(tree), encoding="utf-8")
    return path


def forced(
    folder: Path,
    *,
    formats: Sequence[str],
    block: int,
    scales: str,
    uncompressed: str,
    steps: int,
) -> list[str]:
    """Returns the overrides that the benchmark needs, whatever the configuration says.

    The learning rate is zero: every step does the work of a training step, and all arms, the
    silent one with its wrong numbers too, see the same weights.

    Args:
        folder: Run folder's parent.
        formats: What the arms do on the tensor axis; ``auto`` measures and decides for the first of
            the others, or for E4M3; none turns compression off. The other axes' hooks are the
            benchmark's own, so in this configuration they are off.
        block: Elements that share a scale.
        scales: How scales are sent.
        uncompressed: A key of ``UNCOMPRESSED``; with compression it has to be ``sdpa``.
        steps: Steps to train.
    """
    return [
        f"run.dir={folder}",
        "run.name=bench-step",
        "run.quiet=true",
        f"megatron.train_iters={steps}",
        "megatron.train_samples=null",
        f"megatron.log_interval={steps + 1}",
        "megatron.eval_iters=0",
        "megatron.eval_interval=null",
        "megatron.save=null",
        "megatron.load=null",
        "megatron.lr=0.0",
        "megatron.min_lr=null",
        "megatron.lr_decay_style=constant",
        "megatron.lr_decay_iters=null",
        "megatron.lr_warmup_fraction=null",
        "megatron.lr_warmup_iters=null",
        "megatron.lr_warmup_samples=null",
        "megatron.check_for_nan_in_loss_and_grad=false",
        "compression.pipeline_parallel.mode=off",
        "compression.data_parallel.mode=off",
        "telemetry.error_every=0",
        "telemetry.tensorboard=false",
        "telemetry.wandb=null",
        *UNCOMPRESSED[uncompressed],
        *_compression(formats, block, scales),
    ]


def _compression(formats: Sequence[str], block: int, scales: str) -> list[str]:
    section = "compression.tensor_parallel"
    if not formats:
        return [f"{section}.mode=off"]
    values = {
        "mode": "auto" if AUTO in formats else "on",
        "format": next((name for name in formats if name not in (AUTO, FP32)), "e4m3"),
        "block": block,
        "scales": scales,
        "start_step": 0,
    }
    return [f"{section}.{key}={value}" for key, value in values.items()]
