"""Transformer Engine's attention and norms, for layers whose linears are Megatron's own."""

from __future__ import annotations

from typing import Any

from megatron_taco.config import ConfigError
from megatron_taco.training.extras import INSTALL_TE


def te_attention_and_norms() -> tuple[Any, Any]:
    """Core attention and norm of Megatron's Transformer Engine layers.

    Raises:
        ConfigError: Transformer Engine is not installed.
    """
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        raise ConfigError(
            "te_block_spec: Transformer Engine is not installed, or Megatron could not import it; "
            f"{INSTALL_TE}"
        )
    return transformer_engine.TEDotProductAttention, transformer_engine.TENorm
