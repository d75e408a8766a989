"""Combinations of Megatron features and compression that are refused, with the setting to change.

A feature is refused when its traffic passes where no target of ours is (inside a GEMM, inside
Transformer Engine, in another library), or when our Python would be frozen by it: an enabled role
would then never happen, or never be counted. Contradictions within our own sections are for the
schema (`config/`) to find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_taco.config.megatron_section import whole
from megatron_taco.patching import data_conflicts, pipeline_conflicts

if TYPE_CHECKING:
    from megatron_taco.config import Config

_MODE = "compression.tensor_parallel.mode"


@dataclass(frozen=True)
class _Rule:
    """A Megatron argument which does not go with tensor-parallel compression."""

    key: str
    refuses: Callable[[Any], bool]
    reason: str
    change: str


def _is_on(value: Any) -> bool:
    return value is True


def _is_set(value: Any) -> bool:
    return value not in (None, False, "none")


_FSDP = "its parameter and gradient traffic is other code, which no target of ours reaches"
_RULES = (
    _Rule(
        "tp_comm_overlap",
        _is_on,
        "its collectives run inside the GEMM (userbuffers), where nothing can be compressed",
        "set megatron.tp_comm_overlap: false",
    ),
    _Rule(
        "transformer_impl",
        lambda value: value is not None and value != "local",
        "its linear layers do their tensor-parallel collectives themselves, "
        "and those are not hooked",
        "set megatron.transformer_impl: local",
    ),
    _Rule(
        "cuda_graph_impl",
        _is_set,
        "a captured graph freezes the choice and the count of compressed collectives",
        "set megatron.cuda_graph_impl: none",
    ),
    _Rule(
        "enable_cuda_graph",
        _is_on,
        "a captured graph freezes the choice and the count of compressed collectives",
        "remove megatron.enable_cuda_graph",
    ),
    _Rule(
        "external_cuda_graph",
        _is_on,
        "a captured graph freezes the choice and the count of compressed collectives",
        "remove megatron.external_cuda_graph",
    ),
    _Rule("use_megatron_fsdp", _is_on, _FSDP, "set megatron.use_megatron_fsdp: false"),
    _Rule("use_custom_fsdp", _is_on, _FSDP, "remove megatron.use_custom_fsdp"),
    _Rule("use_torch_fsdp2", _is_on, _FSDP, "set megatron.use_torch_fsdp2: false"),
)


def check(config: Config) -> list[str]:
    """Return why this configuration cannot run, one message a reason; empty if it can.

    Args:
        config: A loaded configuration; `megatron` and `compression` are read.

    Returns:
        `LOCATION: KEY: found; why; what to change`, in a fixed order.
    """
    found = data_conflicts.check(config) + pipeline_conflicts.check(config)
    tensor = config.compression.tensor_parallel
    if tensor.mode == "off":
        return found
    megatron: Mapping[str, Any] = config.megatron

    def refuse(key: str, text: str) -> None:
        found.append(f"{config.where(key)}: {key}: {text}")

    size = _integer(megatron, "tensor_model_parallel_size", 1)
    if size == 1:
        refuse(
            _MODE,
            f"{tensor.mode} with megatron.tensor_model_parallel_size 1: there is nothing to "
            "compress; set a tensor-parallel size of 2 or more, or mode: off",
        )
    for rule in _RULES:
        value = megatron.get(rule.key)
        if rule.refuses(value):
            refuse(
                f"megatron.{rule.key}",
                f"{_shown(value)} does not go with {_MODE}: {tensor.mode}: "
                f"{rule.reason}; {rule.change}, or compression off",
            )
    for key, parts in (
        ("tensor_parallel_num_weight_shards", size),
        (
            "expert_tensor_parallel_num_weight_shards",
            _integer(megatron, "expert_tensor_parallel_size", size),
        ),
    ):
        shards = _integer(megatron, key, parts)
        if shards > parts:
            refuse(
                f"megatron.{key}",
                f"{shards} over a tensor-parallel size of {parts} shards weights further and "
                "gathers them by code that no target of ours reaches; "
                f"set megatron.{key}: {parts}, or compression off",
            )
    return found


def notes(config: Config) -> list[str]:
    """Return what stays uncompressed in this configuration, one line each; nothing is refused.

    Args:
        config: A loaded configuration.
    """
    if config.compression.tensor_parallel.mode == "off":
        return []
    megatron: Mapping[str, Any] = config.megatron
    found = []
    experts = megatron.get("num_experts")
    if _is_set(experts) or _integer(megatron, "expert_model_parallel_size", 1) > 1:
        found.append(
            "mixture of experts: the all-to-all of tokens and all that the router sends stay as "
            "they are; only the tensor-parallel sums are compressed"
        )
    if _is_on(megatron.get("distribute_saved_activations")):
        found.append(
            "megatron.distribute_saved_activations: the gather of saved activations stays exact"
        )
    if _is_on(megatron.get("defer_embedding_wgrad_compute")):
        found.append(
            "megatron.defer_embedding_wgrad_compute: its own all-gather after the pipeline stays "
            "exact"
        )
    return found


def _integer(arguments: Mapping[str, Any], key: str, default: int) -> int:
    """A whole-number argument (2.0 is 2), or the default where it is absent or no such number.

    Megatron's parser checks types.
    """
    value = whole(arguments.get(key))
    return default if value is None else value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
