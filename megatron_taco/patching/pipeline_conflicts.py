"""What does not go with pipeline boundaries, with the line and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_taco.config.megatron_section import whole

if TYPE_CHECKING:
    from megatron_taco.config import Config

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
    return [f"{config.where(key)}: {key}: {text}" for key, text in _problems(config)]


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    settings, megatron = config.compression.pipeline_parallel, config.megatron
    for name, (reason, change) in _REFUSED.items():
        value: Any = megatron.get(name)
        if value not in (None, False, "none"):
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            yield (
                f"megatron.{name}",
                f"{shown} does not go with {_SECTION}.mode: on: {reason}; {change}, or mode: off",
            )
    layers, hidden = config.model.num_layers or 0, config.model.hidden_size or 0
    stages = whole(megatron.get("pipeline_model_parallel_size")) or 1
    if settings.after_layers is None and stages == 1:
        yield (
            f"{_SECTION}.mode",
            "on with megatron.pipeline_model_parallel_size 1 and no after_layers: there is no "
            f"stage cut to put a boundary at; set {_SECTION}.after_layers, or mode: off",
        )
    outside = [depth for depth in settings.after_layers or () if depth >= layers]
    if outside:
        yield (
            f"{_SECTION}.after_layers",
            f"{outside} with {layers} layers; allowed: depths from 1 to {layers - 1}",
        )
    if settings.resolved_rank() > hidden:
        found = settings.resolved_rank()
        default = " (the default)" if settings.rank is None else ""
        yield (
            f"{_SECTION}.rank",
            f"{found}{default} with a hidden size of {hidden}; allowed: 1 to {hidden}",
        )
