"""What does not go with pipeline boundaries, with the line and what to change."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_taco.config.gradient_methods import SPARSELOCO
from megatron_taco.config.megatron_section import whole
from megatron_taco.config.pipeline_parallel import LEARNED, SUBSPACE
from megatron_taco.patching import subspace_conflicts

if TYPE_CHECKING:
    from megatron_taco.config import Config, Settings

_SECTION = "compression.pipeline_parallel"
_DEPTHS = f"{_SECTION}.after_layers"
_FORWARD = f"{_SECTION}.quantizer.forward"
_METHOD = "compression.data_parallel.gradients.compressor"
_TAH_TILE = 64
_GRAPHS = "a captured graph freezes which boundary's message is sent and which token ids it has"
_FSDP = "its parameters and optimisers are other code, which no target of ours reaches"
_BATCHES = (
    "two micro-batches are run by a schedule of their layers' parts, which passes by the layers' "
    "own forward and what is hooked there"
)
_REFUSED = {
    "cuda_graph_impl": (_GRAPHS, "set megatron.cuda_graph_impl: none"),
    "enable_cuda_graph": (_GRAPHS, "remove megatron.enable_cuda_graph"),
    "external_cuda_graph": (_GRAPHS, "remove megatron.external_cuda_graph"),
    "use_megatron_fsdp": (_FSDP, "set megatron.use_megatron_fsdp: false"),
    "use_custom_fsdp": (_FSDP, "remove megatron.use_custom_fsdp"),
    "use_torch_fsdp2": (_FSDP, "set megatron.use_torch_fsdp2: false"),
    "overlap_moe_expert_parallel_comm": (
        _BATCHES,
        "set megatron.overlap_moe_expert_parallel_comm: false",
    ),
}


def check(config: Config) -> list[str]:
    """Return why this configuration cannot run with boundaries, one message a reason.

    Args:
        config: A loaded configuration.
    """
    if not config.compression.pipeline_parallel.enabled:
        return []
    architecture = config.model.arguments()
    found = []
    for key, text in _problems(config, {**architecture, **config.megatron}):
        section, _, name = key.partition(".")
        of_model = section == "megatron" and name in type(config.model).model_fields
        if of_model and name not in config.megatron:
            text = text.replace(key, f"model.{name}")
            key = f"model.{name}"
        found.append(f"{config.where(key)}: {key}: {text}")
    return found


def check_stages(config: Settings, args: Namespace) -> list[str]:
    """Return why boundaries do not fit the stages that Megatron makes of the layers.

    Args:
        config: The configuration.
        args: Megatron's arguments, validated.
    """
    from megatron.training.argument_utils import core_transformer_config_from_args

    from megatron_taco.patching.boundary_layout import resolve_depths, stage_cuts
    from megatron_taco.patching.errors import BoundaryError

    settings = config.compression.pipeline_parallel
    if not settings.enabled:
        return []
    transformer = core_transformer_config_from_args(args)
    cuts = stage_cuts(transformer)
    try:
        depths = resolve_depths(settings.after_layers, cuts, args.num_layers)
    except BoundaryError as error:
        return [f"{config.where(_DEPTHS)}: {error}"]
    in_place = sorted(set(depths) - set(cuts))
    eight_bits = transformer.fp8 or transformer.fp4
    recomputed = transformer.recompute_granularity == "full"
    if in_place and eight_bits and recomputed and settings.resolved_anchors() != "none":
        return [
            f"{config.where(_DEPTHS)}: {_DEPTHS}: boundaries within a stage, {in_place}, with "
            f"anchors and full recomputation of layers in {eight_bits}: Transformer Engine's own "
            "checkpointing runs the layers again, which does not keep their token ids; set "
            "recompute_granularity: selective, anchors: none, or depths at the stage cuts alone"
        ]
    return []


def check_arguments(settings: Settings, arguments: Mapping[str, Any]) -> list[str]:
    """Return why a script's own command line cannot run with boundaries; empty if it can.

    Args:
        settings: What the script is to run with.
        arguments: Megatron's validated arguments by their own names.
    """
    if not settings.compression.pipeline_parallel.enabled:
        return []
    found = []
    for key, text in _problems(settings, arguments):
        ours = key.startswith("compression.")
        where = settings.where(key if ours else f"{_SECTION}.mode")
        line = f"{where}: {key}: {text}" if ours else f"{key}: {text} ({where})"
        found.append(
            re.sub(r"\bmegatron\.(\w+)", lambda name: "--" + name[1].replace("_", "-"), line)
        )
    return found


def notes(settings: Settings, train_iters: int | None) -> list[str]:
    """Return what a run does otherwise than the file seems to say, one line each.

    Args:
        settings: The configuration.
        train_iters: Steps of the run, if known.
    """
    parallel = settings.compression.pipeline_parallel
    if not parallel.enabled:
        return []
    return _sums_of_local_steps(settings) + _never_quantised(settings, train_iters)


def _sums_of_local_steps(settings: Settings) -> list[str]:
    parallel = settings.compression.pipeline_parallel
    if not _steps_apart(settings):
        return []
    sums = ["gradients of projectors"] if parallel.boundary in LEARNED else []
    sums += ["statistics of codebooks"] if parallel.quantizer.forward.kind == "rvq" else []
    if not sums:
        return []
    return [
        f"{settings.where(_METHOD)}: {_METHOD}: {SPARSELOCO} with {_SECTION}.boundary: "
        f"{parallel.boundary}: {' and '.join(sums)} are summed over all replicas in every step, "
        "local ones too, on the link that local steps are to spare; boundary: fixed with another "
        "quantizer than rvq has no such sums"
    ]


def _steps_apart(settings: Settings) -> bool:
    parallel = settings.compression.data_parallel
    return parallel.enabled and parallel.gradients.rounds is not None


def _never_quantised(settings: Settings, train_iters: int | None) -> list[str]:
    forward = settings.compression.pipeline_parallel.quantizer.forward
    if forward.kind != "rvq" or train_iters is None:
        return []
    warmup = _rvq(forward.options()).warmup_steps
    if warmup < train_iters:
        return []
    key = f"{_FORWARD}.warmup_steps"
    return [
        f"{settings.where(key)}: {key}: {warmup} in a run of {train_iters} steps: its messages are "
        "never quantised, since codebooks come into force after the warm-up"
    ]


def _rvq(options: Mapping[str, Any]) -> Any:
    from megatron_taco.boundaries import RvqSettings

    return RvqSettings(**options)


def _problems(config: Settings, megatron: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = config.compression.pipeline_parallel
    layers, hidden = whole(megatron.get("num_layers")), whole(megatron.get("hidden_size"))
    for name, (reason, change) in _REFUSED.items():
        value: Any = megatron.get(name)
        if value not in (None, False, "none"):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            yield (
                f"megatron.{name}",
                f"{shown} does not go with {_SECTION}.mode: on: {reason}; {change}, or mode: off",
            )
    stages = whole(megatron.get("pipeline_model_parallel_size")) or 1
    if settings.after_layers is None and stages == 1:
        yield (
            f"{_SECTION}.mode",
            "on with megatron.pipeline_model_parallel_size 1 and no after_layers: there is no "
            f"stage cut to put a boundary at; set {_SECTION}.after_layers, or mode: off",
        )
    depths = settings.after_layers or ()
    outside = [depth for depth in depths if layers is not None and depth >= layers]
    if outside and layers is not None:
        yield (
            _DEPTHS,
            f"{outside} with {layers} layers; allowed: depths from 1 to {layers - 1}",
        )
    if hidden is not None:
        yield from _sizes(config, hidden)
    if settings.boundary == SUBSPACE:
        if _steps_apart(config):
            yield (
                _METHOD,
                f"{SPARSELOCO} does not go with {_SECTION}.boundary: {SUBSPACE}: the sparse values "
                "that are exchanged take weights out of the subspace; choose another compressor, "
                "or another boundary",
            )
        for name, text in subspace_conflicts.problems(megatron):
            yield f"megatron.{name}", text


def _sizes(config: Settings, hidden: int) -> Iterator[tuple[str, str]]:
    settings = config.compression.pipeline_parallel
    rank = settings.resolved_rank()
    default = " (the default)" if settings.rank is None else ""
    if rank > hidden:
        yield (
            f"{_SECTION}.rank",
            f"{rank}{default} with a hidden size of {hidden}; allowed: 1 to {hidden}",
        )
    if settings.boundary == "tah_quant" and hidden % _TAH_TILE:
        yield (
            f"{_SECTION}.boundary",
            f"tah_quant with a hidden size of {hidden}; its tiles need a multiple of {_TAH_TILE}",
        )
    forward = settings.quantizer.forward
    if forward.kind == "rvq" and rank:
        try:
            _rvq(forward.options()).group_count(rank)
        except ValueError as error:
            yield _FORWARD, f"{error}; the rank is {rank}{default}"
