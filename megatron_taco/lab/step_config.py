"""The configuration that ``bench step`` trains with: the reference model, or the user's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_taco.lab.step_schedule import AUTO

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

_REFERENCE: Final = """\
# 8 layers, hidden 2048, 16 heads, vocabulary 32,000, sequence 2048
data: {source: mock, tokenizer: {null: 32000}}
model: {preset: gpt-reference}
megatron:
  micro_batch_size: 4
  global_batch_size: 8
  bf16: true
  hidden_dropout: 0.0
  attention_dropout: 0.0
"""
_TINY: Final = """\
data: {source: mock, tokenizer: {null: 256}}
model: {preset: gpt-tiny}
megatron:
  micro_batch_size: 4
  global_batch_size: 8
  bf16: true
  hidden_dropout: 0.0
  attention_dropout: 0.0
compression: {tensor_parallel: {min_bytes: 4KiB}}
"""


def write(folder: Path, *, gpu: bool) -> Path:
    """Writes the benchmark's own configuration, of a tiny model where there is no GPU.

    Args:
        folder: Where to.
        gpu: Whether this rank has a GPU.
    """
    path = folder / ("gpt-reference.yaml" if gpu else "gpt-tiny.yaml")
    world = os.environ["WORLD_SIZE"]
    text = _REFERENCE if gpu else _TINY
    sized = text.replace("megatron:\n", f"megatron:\n  tensor_model_parallel_size: {world}\n")
    path.write_text(sized, encoding="utf-8")
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
        formats: The compressed arms; ``auto`` measures and decides for the first of the others,
            or for E4M3; none turns compression off.
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
        "format": next((name for name in formats if name != AUTO), "e4m3"),
        "block": block,
        "scales": scales,
        "start_step": 0,
    }
    return [f"{section}.{key}={value}" for key, value in values.items()]
