"""Section `megatron`: any Megatron-LM argument by its own name.

Megatron's own parser checks names and values later (training/megatron_args.py). Here it is only
checked that the section is flat and leaves alone what another section says.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from megatron_taco.config.model import ARCHITECTURE

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")

OWNED: Final[dict[str, str]] = {
    **{name: f"model.{name}" for name in ARCHITECTURE},
    "layernorm_epsilon": "model.norm_epsilon",
    "disable_bias_linear": "model.add_bias_linear",
    "group_query_attention": "model.num_query_groups",
    "use_rotary_position_embeddings": "model.position_embedding_type",
    "padded_vocab_size": "model.vocab_size",
    "data_path": "data.path",
    "train_data_path": "data.train_path",
    "valid_data_path": "data.valid_path",
    "test_data_path": "data.test_path",
    "data_args_path": "data.path",
    "per_split_data_args_path": "data.train_path",
    "mock_data": "data.source: mock",
    "split": "data.split",
    "tokenizer_type": "data.tokenizer",
    "tokenizer_model": "data.tokenizer",
    "null_tokenizer_eod_id": "data.tokenizer",
    "vocab_file": "data.tokenizer",
    "merge_file": "data.tokenizer",
    "tensorboard_dir": "telemetry.tensorboard",
    "wandb_project": "telemetry.wandb",
    "wandb_exp_name": "run.name",
    "wandb_save_dir": "run.dir",
    "wandb_entity": "telemetry.wandb",
}
"""Megatron arguments that belong to another section, and where they are written instead."""

REFUSED: Final[dict[str, str]] = {
    "yaml_cfg": "this file takes the place of Megatron's own YAML; write the arguments here",
    "use_checkpoint_args": "the architecture comes from the section model, not from a checkpoint",
}
"""Megatron arguments that have no place here, and why."""

_NO_MASK: Final = (
    "the training step passes no attention mask, attention is causal over the whole sequence"
)
NOT_TRUE: Final[dict[str, str]] = {
    "reset_attention_mask": f"{_NO_MASK}; remove it (reset_position_ids and eod_mask_loss work)",
    "create_attention_mask_in_dataloader": f"{_NO_MASK}; remove it",
    "dataloader_inter_document_masking": f"{_NO_MASK}; remove it",
}
"""Switches of Megatron that would do nothing here, and why."""


def whole(value: object) -> int | None:
    """Return a value as a whole number (2.0 is 2, as everywhere in `megatron`), or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float)


def megatron_problems(section: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for what is wrong with the form of the section `megatron`."""
    for name, value in section.items():
        plain = name.lstrip("-").replace("-", "_")
        if plain in REFUSED:
            yield name, f"not allowed: {REFUSED[plain]}"
        elif plain in NOT_TRUE and value is True:
            yield name, f"true is not allowed: {NOT_TRUE[plain]}"
        elif plain in OWNED:
            yield name, f"belongs to another section; write it as {OWNED[plain]}"
        elif not _NAME.match(name):
            yield name, f"unknown key; Megatron's names have underscores (nearest: {plain})"
        elif isinstance(value, dict):
            yield name, "a mapping is not allowed; allowed: a scalar or a list of scalars"
        elif isinstance(value, list) and not all(map(_is_scalar, value)):
            yield name, f"{value!r} is not allowed; allowed: a scalar or a list of scalars"
