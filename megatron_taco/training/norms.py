"""LayerNorm and RMSNorm by torch's fused kernels, also under sequence parallelism.

Megatron's own wrapper of torch's norms refuses sequence parallelism, though all that is missing is
the mark which makes Megatron sum the norm's gradients over the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def torch_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
) -> torch.nn.Module:
    """Build the norm that ``config.normalization`` names over the last dimension.

    Args:
        config: gives ``normalization`` (LayerNorm or RMSNorm) and ``sequence_parallel``.
        hidden_size: size of the last dimension.
        eps: added to the variance.
        **unused: further arguments of Megatron's norm builders.

    Raises:
        ValueError: for a normalization torch does not have, or a zero-centred gamma.
    """
    if config.layernorm_zero_centered_gamma:
        raise ValueError("megatron.apply_layernorm_1p: torch's norms have no zero-centred gamma")
    norm: torch.nn.Module
    if config.normalization == "LayerNorm":
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
    elif config.normalization == "RMSNorm":
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    else:
        raise ValueError(
            f"model.normalization: {config.normalization!r} is not allowed; "
            "allowed: LayerNorm, RMSNorm"
        )
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
