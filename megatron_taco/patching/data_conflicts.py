"""Combinations of Megatron features and data-parallel compression that are refused, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_taco.config.megatron_section import whole
from megatron_taco.config.messages import shown

if TYPE_CHECKING:
    from megatron_taco.config import Config, Settings

_MODE = "compression.data_parallel.mode"
_WEIGHTS = "compression.data_parallel.weights.compressor"
_ALONE = (
    "with a data-parallel size of 1 (and no context parallelism): there is nothing to compress; "
    "start more ranks, or set mode: off"
)


@dataclass(frozen=True)
class _Rule:
    """A Megatron argument that does not go with compressed gradients or weights."""

    key: str
    refuses: Callable[[Any], bool]
    reason: str
    change: str


def _is_on(value: Any) -> bool:
    return value is True


def _is_set(value: Any) -> bool:
    return value not in (None, False, "none")


_FSDP = "its gradient and weight traffic is other code, which no target of ours reaches"
_GRAPH = "a captured graph freezes the choice and the count of compressed collectives"
_RULES = (
    _Rule("use_megatron_fsdp", _is_on, _FSDP, "set megatron.use_megatron_fsdp: false"),
    _Rule("use_custom_fsdp", _is_on, _FSDP, "remove megatron.use_custom_fsdp"),
    _Rule("use_torch_fsdp2", _is_on, _FSDP, "set megatron.use_torch_fsdp2: false"),
    _Rule(
        "reduce_scatter_with_fp32_accumulation",
        _is_on,
        "it takes the place that ours needs, and compressed sums are made in FP32 anyway",
        "set megatron.reduce_scatter_with_fp32_accumulation: false",
    ),
    _Rule(
        "num_distributed_optimizer_instances",
        lambda value: (whole(value) or 1) > 1,
        "gradients are then reduced a second time, on another group and stream",
        "set megatron.num_distributed_optimizer_instances: 1",
    ),
    _Rule(
        "optimizer",
        lambda value: value == "dist_muon",
        "the layer-wise optimiser gathers weights by its own code",
        "choose another megatron.optimizer",
    ),
    _Rule("cuda_graph_impl", _is_set, _GRAPH, "set megatron.cuda_graph_impl: none"),
    _Rule("enable_cuda_graph", _is_on, _GRAPH, "remove megatron.enable_cuda_graph"),
    _Rule("external_cuda_graph", _is_on, _GRAPH, "remove megatron.external_cuda_graph"),
)
_NOT_MASTERS = "master weights are then not where differences are made from"
_WEIGHT_RULES = (
    _Rule(
        "use_precision_aware_optimizer",
        _is_on,
        _NOT_MASTERS,
        "set megatron.use_precision_aware_optimizer: false",
    ),
    _Rule(
        "optimizer_cpu_offload", _is_on, _NOT_MASTERS, "set megatron.optimizer_cpu_offload: false"
    ),
    _Rule(
        "fp8_param_gather",
        _is_on,
        "weights are gathered in FP8 already",
        "set megatron.fp8_param_gather: false",
    ),
    _Rule(
        "fp4_param_gather",
        _is_on,
        "weights are gathered in FP4 already",
        "set megatron.fp4_param_gather: false",
    ),
    _Rule(
        "overlap_param_gather_with_optimizer_step",
        _is_on,
        "a gather would start before all differences have been made",
        "set megatron.overlap_param_gather_with_optimizer_step: false",
    ),
)
_START = "compression.data_parallel.start_step"
_LOCAL = "compression.data_parallel.gradients.local_steps"
_METHOD = "compression.data_parallel.gradients.compressor"
_CHECKPOINT_KEYS = ("save", "load")
_METHOD_RULES = (
    _Rule(
        "fp16",
        _is_on,
        "memory is in units of the loss scale, which changes",
        "set megatron.bf16: true instead of fp16",
    ),
)
_APART = "replicas take steps of their own"
_LOCAL_RULES = (
    _Rule(
        "use_distributed_optimizer",
        _is_on,
        f"{_APART}, and a rank of the distributed optimiser has moments of one slice alone",
        "set megatron.use_distributed_optimizer: false",
    ),
    _Rule(
        "num_experts",
        _is_set,
        f"{_APART}, and expert parallelism spreads one replica over several",
        "remove megatron.num_experts",
    ),
    _Rule(
        "check_weight_hash_across_dp_replicas_interval",
        _is_set,
        f"{_APART}, so their weights differ within a round",
        "remove megatron.check_weight_hash_across_dp_replicas_interval",
    ),
)
_MEMORY_RULES = (
    _Rule(
        "ckpt_format",
        lambda value: value not in (None, "torch_dist"),
        "its memory is saved in Megatron's distributed checkpoints alone",
        "set megatron.ckpt_format: torch_dist",
    ),
    _Rule(
        "non_persistent_ckpt_type",
        _is_set,
        "its memory is saved in persistent checkpoints alone",
        "remove megatron.non_persistent_ckpt_type",
    ),
)


def check(config: Config) -> list[str]:
    """Return why data-parallel compression cannot run, one message a reason; empty if it can.

    Args:
        config: A loaded configuration; `megatron` and `compression.data_parallel` are read.

    Returns:
        `LOCATION: KEY: found; why; what to change`, in a fixed order.
    """
    if not config.compression.data_parallel.enabled:
        return []
    reasons = _reasons(config, config.megatron)
    return [f"{config.where(key)}: {key}: {text}" for key, text in reasons]


def check_arguments(settings: Settings, arguments: Mapping[str, Any]) -> list[str]:
    """Return why a script's own command line cannot run so compressed; empty if it can.

    Args:
        settings: What the script is to run with.
        arguments: Megatron's validated arguments by their own names.
    """
    parallel = settings.compression.data_parallel
    if not parallel.enabled:
        return []
    found = [_in_flags(f"{key}: {text}") for key, text in _reasons(settings, arguments)]
    if replicas(arguments) == 1:
        found.append(f"{_MODE}: {parallel.mode} ({settings.where(_MODE)}) {_ALONE}")
    return found


def replicas(arguments: Mapping[str, Any]) -> int | None:
    """Return how many ranks gradients are reduced over; None if the size is not known yet.

    Args:
        arguments: Megatron's validated arguments by their own names. Context-parallel ranks hold
            the same weights, and Megatron reduces over data x context parallel.
    """
    data = whole(arguments.get("data_parallel_size"))
    return None if data is None else data * (whole(arguments.get("context_parallel_size")) or 1)


def _in_flags(text: str) -> str:
    """A text in which Megatron's arguments are named as on its command line."""
    return re.sub(r"\bmegatron\.(\w+)", lambda name: "--" + name[1].replace("_", "-"), text)


def _reasons(config: Settings, megatron: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = config.compression.data_parallel
    weights = settings.weights
    yield from _refused(megatron, _RULES, f"{_MODE}: {settings.mode}", "compression off")
    if megatron.get("optimizer") == "muon" and _is_on(megatron.get("use_distributed_optimizer")):
        yield (
            "megatron.optimizer",
            f"muon with use_distributed_optimizer does not go with {_MODE}: {settings.mode}: the "
            "layer-wise optimiser gathers weights by its own code; "
            "set megatron.use_distributed_optimizer: false, or compression off",
        )
    if not _is_on(megatron.get("use_distributed_optimizer")):
        for name in ("two_level", "ranks_per_node"):
            if value := getattr(settings.gradients, name):
                yield (
                    f"compression.data_parallel.gradients.{name}",
                    f"{shown(value)} has no effect without megatron.use_distributed_optimizer: "
                    f"true: an all-reduce goes in one hop; set it, or leave {name} out",
                )
    if (method := settings.gradients.method) is not None:
        found, other = f"{_METHOD}: {method}", "another compressor"
        yield from _refused(megatron, _METHOD_RULES, found, other)
        if any(megatron.get(key) is not None for key in _CHECKPOINT_KEYS):
            yield from _refused(megatron, _MEMORY_RULES, found, other)
    if (rounds := settings.gradients.rounds) is not None:
        yield from _refused(megatron, _LOCAL_RULES, f"{_METHOD}: {method}", "another compressor")
        yield from _uneven(megatron, settings.start_step, rounds)
    if not weights.enabled:
        return
    found = f"{_WEIGHTS}: {weights.compressor}"
    yield from _refused(megatron, _WEIGHT_RULES, found, "weights.compressor: none")
    if not _is_on(megatron.get("use_distributed_optimizer")):
        yield (
            _WEIGHTS,
            f"{weights.compressor} needs megatron.use_distributed_optimizer: true (without it no "
            "weights are sent); set it, or weights.compressor: none",
        )
    if not (_is_on(megatron.get("bf16")) or _is_on(megatron.get("fp16"))):
        yield (
            _WEIGHTS,
            f"{weights.compressor} needs megatron.bf16 or fp16: FP32 weights have no master "
            "copies apart, and rounding them would be training on rounded ones; "
            "set bf16: true, or weights.compressor: none",
        )


def _uneven(megatron: Mapping[str, Any], start_step: int, rounds: int) -> Iterator[tuple[str, str]]:
    """Yield where training ends, or a checkpoint is saved, within a round of local steps."""
    steps = whole(megatron.get("train_iters"))
    if steps is not None and steps > start_step and (steps - start_step) % rounds:
        nearest = steps - (steps - start_step) % rounds
        yield (
            "megatron.train_iters",
            f"{steps} ends within a round of {rounds} local steps from start_step {start_step}, "
            f"where replicas have weights of their own; set {max(nearest, start_step + rounds)}, "
            f"or another {_LOCAL}",
        )
    every = whole(megatron.get("save_interval"))
    if megatron.get("save") is not None and every and (every % rounds or start_step % rounds):
        key = "megatron.save_interval" if every % rounds else _START
        yield (
            key,
            f"{every if every % rounds else start_step} is no multiple of {_LOCAL}: {rounds}, so "
            "checkpoints would be of replicas that have weights of their own; allowed: a "
            f"multiple of {rounds}",
        )


def _refused(
    megatron: Mapping[str, Any], rules: tuple[_Rule, ...], found: str, otherwise: str
) -> Iterator[tuple[str, str]]:
    for rule in rules:
        value = megatron.get(rule.key)
        if rule.refuses(value):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            yield (
                f"megatron.{rule.key}",
                f"{shown} does not go with {found}: {rule.reason}; {rule.change}, or {otherwise}",
            )


def check_size(config: Config, arguments: Mapping[str, Any]) -> list[str]:
    """Return why a run on this many ranks has nothing to compress; empty if it has.

    Args:
        config: A loaded configuration.
        arguments: As for :func:`replicas`.
    """
    settings = config.compression.data_parallel
    if not settings.enabled or replicas(arguments) != 1:
        return []
    return [f"{config.where(_MODE)}: {_MODE}: {settings.mode} {_ALONE}"]
