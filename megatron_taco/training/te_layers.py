"""Transformer Engine's attention and norms, for layers whose linears are Megatron's own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from megatron_taco.config import Config, ConfigError, Problem

_INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]'"


def missing(config: Config) -> list[Problem]:
    """Why a configuration's layers cannot be built for lack of Transformer Engine.

    Args:
        config: a loaded configuration.

    Returns:
        One problem a key; empty if they can be.
    """
    if find_spec("transformer_engine") is not None:
        return []
    impl = config.megatron.get("transformer_impl")
    asked = {
        "model.attention": (config.model.attention, "sdpa"),
        "megatron.transformer_impl": (impl, "local"),
    }
    return [
        config.problem(
            key, f"{value}: Transformer Engine is not installed; {_INSTALL}, or set {instead}"
        )
        for key, (value, instead) in asked.items()
        if value in ("te", "transformer_engine")
    ]


def te_attention_and_norms() -> tuple[Any, Any]:
    """Core attention and norm of Megatron's Transformer Engine layers.

    Raises:
        ConfigError: Transformer Engine is not installed.
    """
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        raise ConfigError(
            "te_block_spec: Transformer Engine is not installed, or Megatron could not import it; "
            f"{_INSTALL}"
        )
    return transformer_engine.TEDotProductAttention, transformer_engine.TENorm
