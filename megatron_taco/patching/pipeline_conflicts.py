"""What does not go with pipeline boundaries, with the line and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_taco.config.megatron_section import whole

if TYPE_CHECKING:
    from megatron_taco.config import Config, Settings

_SECTION = "compression.pipeline_parallel"
_GRAPHS = "a captured graph freezes which boundary's message is sent and which token ids it has"
_FSDP = "its parameters and optimisers are other code, which no target of ours reaches"
_REFUSED = {
    "cuda_graph_impl": (_GRAPHS, "set megatron.cuda_graph_impl: none"),
    "enable_cuda_graph": (_GRAPHS, "remove megatron.enable_cuda_graph"),
    "external_cuda_graph": (_GRAPHS, "remove megatron.external_cuda_graph"),
    "use_megatron_fsdp": (_FSDP, "set megatron.use_megatron_fsdp: false"),
    "use_custom_fsdp": (_FSDP, "remove megatron.use_custom_fsdp"),
    "use_torch_fsdp2": (_FSDP, "set megatron.use_torch_fsdp2: false"),
}


def check(config: Config) -> list[str]:
    """Return why this configuration cannot run with boundaries, one message a reason.

    Args:
        config: A loaded configuration.
    """
    if not config.compression.pipeline_parallel.enabled:
        return []
    sizes = config.model.num_layers, config.model.hidden_size
    problems = _problems(config, config.megatron, *sizes)
    return [f"{config.where(key)}: {key}: {text}" for key, text in problems]


def check_arguments(settings: Settings, arguments: Mapping[str, Any]) -> list[str]:
    """Return why a script's own command line cannot run with boundaries; empty if it can.

    Args:
        settings: What the script is to run with.
        arguments: Megatron's arguments by their own names.
    """
    if not settings.compression.pipeline_parallel.enabled:
        return []
    sizes = whole(arguments.get("num_layers")), whole(arguments.get("hidden_size"))
    problems = _problems(settings, arguments, *sizes)
    return [
        re.sub(r"\bmegatron\.(\w+)", lambda name: "--" + name[1].replace("_", "-"), text)
        for text in (f"{key}: {text}" for key, text in problems)
    ]


def _problems(
    config: Settings, megatron: Mapping[str, Any], layers: int | None, hidden: int | None
) -> Iterator[tuple[str, str]]:
    settings = config.compression.pipeline_parallel
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
            f"{_SECTION}.after_layers",
            f"{outside} with {layers} layers; allowed: depths from 1 to {layers - 1}",
        )
    if hidden is not None and settings.resolved_rank() > hidden:
        found = settings.resolved_rank()
        default = " (the default)" if settings.rank is None else ""
        yield (
            f"{_SECTION}.rank",
            f"{found}{default} with a hidden size of {hidden}; allowed: 1 to {hidden}",
        )
