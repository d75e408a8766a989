"""What the training tests share: a tiny run of the trainer on the ranks of ``run_ranks``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONFIG = """
run: {name: run, dir: %s, device: cpu}
data: {source: mock, tokenizer: {null: 128}}
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  max_position_embeddings: 64
  position_embedding_type: rope
  normalization: RMSNorm
  swiglu: true
  add_bias_linear: false
megatron:
  micro_batch_size: 2
  global_batch_size: 8
  train_iters: 6
  lr: 3.0e-3
  lr_decay_style: constant
  lr_decay_iters: 20
  eval_iters: 0
  log_interval: 1
  bf16: true
  attention_dropout: 0.0
  hidden_dropout: 0.0
  check_for_nan_in_loss_and_grad: true
  distributed_timeout_minutes: 1
compression:
  tensor_parallel: {mode: on, min_bytes: 1KiB}
"""

OFF = "compression.tensor_parallel.mode=off"
TP2_PP2 = ("megatron.tensor_model_parallel_size=2", "megatron.pipeline_model_parallel_size=2")
SP = "megatron.sequence_parallel=true"
INTERLEAVED = ("megatron.num_layers_per_virtual_pipeline_stage=1",)
DISTRIBUTED_OPTIMIZER = "megatron.use_distributed_optimizer=true"


def write_config(folder: Path, text: str = CONFIG) -> str:
    """Write the tiny configuration into a test's folder; returns its path."""
    path = folder / "tiny.yaml"
    path.write_text(text % folder if "%s" in text else text)
    return str(path)


def train(
    rank: int,
    world_size: int,
    config: str,
    overrides: Sequence[str],
    before: Callable[[int], None] | None = None,
    inspect: Callable[[Any], Any] | None = None,
    expected_code: int = 0,
) -> Any:
    """Run the trainer in this rank's process.

    Args:
        rank: this rank.
        world_size: number of ranks.
        config: path of the YAML file.
        overrides: dotted overrides.
        before: called with the rank before training, to disturb something.
        inspect: called with the model chunks when training is done.
        expected_code: the exit code that the run must have.

    Returns:
        What ``inspect`` returned.
    """
    from megatron_taco.training.run import run

    seen: dict[str, Any] = {}
    if before is not None:
        before(rank)
    if inspect is not None:
        import megatron.training.training as loop

        original = loop.train

        def train_and_look(forward_step_func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(forward_step_func, model, *args, **kwargs)
            seen["model"] = inspect(model)
            return result

        loop.train = train_and_look
    code = run(config, list(overrides))
    assert code == expected_code, f"exit code {code}, expected {expected_code}"
    return seen.get("model")


def metrics(folder: Path, name: str = "run") -> list[dict[str, Any]]:
    """The records that a run wrote."""
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path, name: str = "run") -> dict[int, float]:
    """The loss of each logged step; JSON keeps every bit of it."""
    steps = [line for line in metrics(folder, name) if line["event"] == "step"]
    return {line["iteration"]: line["loss"] for line in steps}
