"""The models of the trainer: GPT, Qwen, LLaMA from Megatron's parts."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_taco.training.attention import TorchAttention
from megatron_taco.training.norms import torch_norm
from megatron_taco.training.te_layers import te_attention_and_norms


def layer_spec(transformer: Any, attention: str) -> ModuleSpec:
    """One layer.

    Args:
        transformer: Megatron's ``TransformerConfig``.
        attention: as for :func:`model_config_from_args`.
    """
    if attention == "megatron" and transformer.transformer_impl != "local":
        return get_gpt_layer_with_transformer_engine_spec(
            transformer.num_moe_experts,
            transformer.moe_grouped_gemm,
            transformer.qk_layernorm,
            transformer.multi_latent_attention,
        )
    spec = get_gpt_layer_local_spec(
        transformer.num_moe_experts,
        transformer.moe_grouped_gemm,
        transformer.qk_layernorm,
        transformer.multi_latent_attention,
        normalization=transformer.normalization,
    )
    if attention == "megatron":
        return spec
    core_attention, norm = _attention_and_norm(attention)
    layer: Any = spec.submodules
    layer.input_layernorm = norm
    if layer.pre_mlp_layernorm is not IdentityOp:
        layer.pre_mlp_layernorm = norm
    self_attention = layer.self_attention.submodules
    self_attention.core_attention = core_attention
    if transformer.qk_layernorm:
        self_attention.q_layernorm = norm
        self_attention.k_layernorm = norm
    return spec


def _attention_and_norm(attention: str) -> tuple[Any, Any]:
    return te_attention_and_norms() if attention == "te" else (TorchAttention, torch_norm)


def block(transformer: Any, attention: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one stage with other attention and norms, the final norm included.

    Args:
        transformer: Megatron's ``TransformerConfig``.
        attention: ``sdpa`` or ``te``.
        vp_stage: virtual pipeline stage of the chunk, or None.
    """
    layer = layer_spec(transformer, attention)
    count = get_num_layers_to_build(transformer, vp_stage)
    _, norm = _attention_and_norm(attention)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def torch_block_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Torch's attention and norms in the form that megatron-core 0.19 asks for.

    Args:
        model_config: Megatron's ``GPTModelConfig``.
        vp_stage: virtual pipeline stage of the chunk, or None.
    """
    return block(model_config.transformer, "sdpa", vp_stage)


def te_block_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Transformer Engine's attention and norms, Megatron's linears; as ``torch_block_spec``.

    Scripts of Megatron-LM 0.19 take it by ``--spec megatron_taco.training.model te_block_spec``.

    Raises:
        ConfigError: Transformer Engine is not installed.
    """
    return block(model_config.transformer, "te", vp_stage)


def model_config_from_args(args: argparse.Namespace, attention: str) -> Any:
    """The model configuration for the builder of megatron-core 0.19.

    Args:
        args: Megatron's validated arguments.
        attention: whose attention and norms: ``sdpa`` for torch's, ``te`` for Transformer
            Engine's, ``megatron`` for Megatron's own layer spec.

    Returns:
        A ``GPTModelConfig`` whose builder makes the stages of this rank.
    """
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(args)
    if attention != "megatron":
        config.transformer_layer_spec = torch_block_spec if attention == "sdpa" else te_block_spec
    return config


class ModelProvider:
    """Builds this rank's stages where Megatron asks for a function: megatron-core 0.18.

    Args:
        args: Megatron's validated arguments.
        attention: as for :func:`model_config_from_args`.
    """

    def __init__(self, args: argparse.Namespace, attention: str) -> None:
        self._args = args
        self._attention = attention

    def __call__(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> GPTModel:
        """Build one stage; Megatron calls it with these names."""
        from megatron.training.arguments import core_transformer_config_from_args

        args = self._args
        transformer = config or core_transformer_config_from_args(args)
        layers: Any = (
            layer_spec(transformer, self._attention)
            if self._attention == "megatron"
            else block(transformer, self._attention, vp_stage)
        )
        return GPTModel(
            config=transformer,
            transformer_layer_spec=layers,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
