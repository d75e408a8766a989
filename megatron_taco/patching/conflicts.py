"""Combinations of Megatron features and compression that are refused, with the setting to change.

A feature is refused when its traffic passes where no target of ours is (inside a GEMM, in another
library), or when our Python would be frozen by it: an enabled role would then never happen, or
never be counted. Contradictions within our own sections are for the schema (`config/`) to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_taco.config.megatron_section import whole
from megatron_taco.patching import data_conflicts, pipeline_conflicts

if TYPE_CHECKING:
    from megatron_taco.config import Config, Settings

_MODE = "compression.tensor_parallel.mode"
_CHUNKS = "compression.tensor_parallel.forward_chunks"
_NO_CHUNKS = "the products in Transformer Engine's linears cannot be made in parts"


@dataclass(frozen=True)
class _Rule:
    """A Megatron argument which does not go with tensor-parallel compression."""

    key: str
    refuses: Callable[[Any], bool]
    reason: str
    instead: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A Megatron argument that has to change, or compression has to be off.

    Attributes:
        key: The argument, by Megatron's name of it.
        value: What it is.
        reason: Why that does not go with compression.
        instead: A value that does, as YAML writes it; None where the argument is to be left out.
    """

    key: str
    value: Any
    reason: str
    instead: str | None


def _is_on(value: Any) -> bool:
    return value is True


def _is_set(value: Any) -> bool:
    return value not in (None, False, "none")


_FSDP = "its parameter and gradient traffic is other code, which no target of ours reaches"
TE_IMPL = "transformer_engine"
"""Megatron's ``transformer_impl`` whose layers are Transformer Engine's."""
_GRAPH = "a captured graph freezes the choice and the count of compressed collectives"
_RULES = (
    _Rule(
        "tp_comm_overlap",
        _is_on,
        "its collectives run inside the GEMM (userbuffers), where nothing can be compressed",
        "false",
    ),
    _Rule(
        "transformer_impl",
        lambda value: value == TE_IMPL and find_spec("transformer_engine") is None,
        "Transformer Engine is not installed",
        "local",
    ),
    _Rule(
        "transformer_impl",
        lambda value: value not in (None, "local", TE_IMPL),
        "its linear layers do their tensor-parallel collectives where no hook of ours is",
        "local",
    ),
    _Rule(
        "use_transformer_engine_op_fuser",
        _is_on,
        "Transformer Engine's fused operations call torch.distributed where no hook of ours is",
        "false",
    ),
    _Rule("symmetric_ar_type", _is_set, "an all-reduce in symmetric memory is not hooked"),
    _Rule("cuda_graph_impl", _is_set, _GRAPH, "none"),
    _Rule("enable_cuda_graph", _is_on, _GRAPH),
    _Rule("external_cuda_graph", _is_on, _GRAPH),
    _Rule("use_megatron_fsdp", _is_on, _FSDP, "false"),
    _Rule("use_custom_fsdp", _is_on, _FSDP),
    _Rule("use_torch_fsdp2", _is_on, _FSDP, "false"),
)


def refusals(arguments: Mapping[str, Any]) -> list[Refusal]:
    """Return what tensor-parallel compression cannot go with, in a fixed order.

    Args:
        arguments: Megatron's arguments by their own names; what is absent is not looked at.
    """
    found = [
        Refusal(rule.key, arguments[rule.key], rule.reason, rule.instead)
        for rule in _RULES
        if rule.key in arguments and rule.refuses(arguments[rule.key])
    ]
    size = tensor_parallel_size(arguments)
    for key, parts in (
        ("tensor_parallel_num_weight_shards", size),
        (
            "expert_tensor_parallel_num_weight_shards",
            _integer(arguments, "expert_tensor_parallel_size", size),
        ),
    ):
        shards = _integer(arguments, key, parts)
        if shards > parts:
            reason = (
                f"over a tensor-parallel size of {parts} it shards weights further and gathers "
                "them by code that no target of ours reaches"
            )
            found.append(Refusal(key, shards, reason, str(parts)))
    return found


def tensor_parallel_size(arguments: Mapping[str, Any]) -> int:
    """Return the number of ranks that share a layer."""
    return _integer(arguments, "tensor_model_parallel_size", 1)


def check(config: Config) -> list[str]:
    """Return why this configuration cannot run, one message a reason; empty if it can.

    Args:
        config: A loaded configuration; `megatron` and `compression` are read.

    Returns:
        `LOCATION: KEY: found; why; what to change`, in a fixed order.
    """
    found = data_conflicts.check(config) + pipeline_conflicts.check(config)
    found += [f"{config.where(k)}: {k}: {text}" for k, text in _late(config, config.megatron)]
    mode = config.compression.tensor_parallel.mode
    if mode == "off":
        return found
    if tensor_parallel_size(config.megatron) == 1:
        found.append(
            f"{config.where(_MODE)}: {_MODE}: "
            f"{mode} with megatron.tensor_model_parallel_size 1: there is nothing to "
            "compress; set a tensor-parallel size of 2 or more, or mode: off"
        )
    for refusal in refusals(config.megatron):
        key = f"megatron.{refusal.key}"
        change = f"set {key}: {refusal.instead}" if refusal.instead else f"remove {key}"
        found.append(
            f"{config.where(key)}: {key}: {_shown(refusal.value)} does not go with "
            f"{_MODE}: {mode}: {refusal.reason}; {change}, or compression off"
        )
    if _overlaps_te(config, config.megatron):
        found.append(
            f"{config.where(_CHUNKS)}: {_CHUNKS}: "
            f"{config.compression.tensor_parallel.forward_chunks} with "
            f"megatron.transformer_impl: {TE_IMPL}: {_NO_CHUNKS}; set forward_chunks: 1, or "
            "transformer_impl: local"
        )
    return found


def check_arguments(settings: Settings, arguments: Mapping[str, Any]) -> list[str]:
    """Return why a script's own command line cannot run compressed; empty if it can.

    Args:
        settings: What the script is to run with.
        arguments: Megatron's validated arguments by their own names.

    Returns:
        One sentence a reason, which names the flag.
    """
    found = data_conflicts.check_arguments(settings, arguments)
    found += pipeline_conflicts.check_arguments(settings, arguments)
    found += [f"{k}: {text} ({settings.where(k)})" for k, text in _late(settings, arguments)]
    mode = settings.compression.tensor_parallel.mode
    if mode == "off":
        return found
    if tensor_parallel_size(arguments) == 1:
        found.append(
            f"--tensor-model-parallel-size 1 with {_MODE}: {mode} "
            f"({settings.where(_MODE)}): there is nothing to compress; give a size of 2 or more, "
            "or mode: off"
        )
    for refusal in refusals(arguments):
        flag = "--" + refusal.key.replace("_", "-")
        given = flag if refusal.value is True else f"{flag} {refusal.value}"
        keep_value = refusal.instead not in (None, "false")
        change = f"give {flag} {refusal.instead}" if keep_value else f"leave {flag} out"
        found.append(
            f"{given} does not go with {_MODE}: {mode} ({settings.where(_MODE)}): "
            f"{refusal.reason}; {change}, or compression off"
        )
    if _overlaps_te(settings, arguments):
        found.append(
            f"{_CHUNKS}: {settings.compression.tensor_parallel.forward_chunks} "
            f"({settings.where(_CHUNKS)}) with --transformer-impl {TE_IMPL}: {_NO_CHUNKS}; set "
            "forward_chunks: 1, or give --transformer-impl local"
        )
    return found


def _late(settings: Settings, megatron: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield axes that would not compress before training ends."""
    steps = whole(megatron.get("train_iters"))
    for axis in ("tensor_parallel", "data_parallel"):
        section = getattr(settings.compression, axis)
        if section.enabled and steps and section.start_step >= steps:
            yield (
                f"compression.{axis}.start_step",
                f"{section.start_step} is not below the {steps} steps of train_iters, so nothing "
                f"would be compressed; allowed: 0 to {steps - 1}, or mode: off",
            )


def _overlaps_te(settings: Settings, arguments: Mapping[str, Any]) -> bool:
    chunks = settings.compression.tensor_parallel.forward_chunks
    return chunks > 1 and arguments.get("transformer_impl") == TE_IMPL


def notes(config: Config) -> list[str]:
    """Return what stays uncompressed in this configuration, one line each; nothing is refused.

    Args:
        config: A loaded configuration.
    """
    megatron: Mapping[str, Any] = config.megatron
    found = pipeline_conflicts.notes(config, whole(megatron.get("train_iters")))
    if config.compression.tensor_parallel.mode == "off":
        return found
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
