"""The model provider: GPT, Qwen, LLaMA from Megatron's parts."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.training.argument_utils import gpt_config_from_args

from megatron_taco.training.attention import TorchAttention
from megatron_taco.training.norms import torch_norm


def torch_layer_spec(model_config: Any) -> ModuleSpec:
    """Megatron's local layer with torch's attention and norms.

    Args:
        model_config: Megatron's ``GPTModelConfig``.
    """
    transformer = model_config.transformer
    spec = get_gpt_layer_local_spec(
        transformer.num_moe_experts,
        transformer.moe_grouped_gemm,
        transformer.qk_layernorm,
        transformer.multi_latent_attention,
        normalization=transformer.normalization,
    )
    layer: Any = spec.submodules
    layer.input_layernorm = torch_norm
    if layer.pre_mlp_layernorm is not IdentityOp:
        layer.pre_mlp_layernorm = torch_norm
    attention = layer.self_attention.submodules
    attention.core_attention = TorchAttention
    if transformer.qk_layernorm:
        attention.q_layernorm = torch_norm
        attention.k_layernorm = torch_norm
    return spec


def torch_block_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one stage with torch's attention and norms, the final norm included.

    Args:
        model_config: Megatron's ``GPTModelConfig``.
        vp_stage: virtual pipeline stage of the chunk, or None.
    """
    layer = torch_layer_spec(model_config)
    count = get_num_layers_to_build(model_config.transformer, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=torch_norm)


def model_config_from_args(args: argparse.Namespace, attention: str) -> Any:
    """Megatron's model configuration for its builder.

    Args:
        args: Megatron's validated arguments.
        attention: ``sdpa`` for the layers above; ``megatron`` for Megatron's own layer spec.

    Returns:
        A ``GPTModelConfig`` whose builder makes the stages of this rank.
    """
    config = gpt_config_from_args(args)
    if attention == "sdpa":
        config.transformer_layer_spec = torch_block_spec
    return config
