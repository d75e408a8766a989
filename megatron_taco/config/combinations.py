"""Settings of `model` and `megatron` that do not go together in this trainer.

What Megatron itself would refuse only once process groups exist, or would run without a word though
the trainer's step and layers leave it out, is refused here, with the line.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_taco.config.megatron_section import whole
from megatron_taco.config.messages import shown
from megatron_taco.config.model import Model


def combination_problems(model: Model, megatron: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for settings that contradict each other.

    Args:
        model: The section `model`, valid by itself.
        megatron: The section `megatron`, whose values Megatron's parser has not seen yet: one of a
            wrong type is left for that parser to refuse.
    """
    layers = model.layers(megatron.get("transformer_impl"))
    if layers == "sdpa":
        yield from _torch_layers(model.attention, megatron)
    local = megatron.get("transformer_impl") in (None, "local")
    context = whole(megatron.get("context_parallel_size")) or 1
    if layers == "te" and not local:
        yield (
            "model.attention",
            "te has Megatron's linears, megatron.transformer_impl: "
            f"{shown(megatron['transformer_impl'])} others; remove transformer_impl, or set "
            "model.attention: megatron",
        )
    if context > 1 and layers != "te" and (local or layers != "megatron"):
        yield (
            "megatron.context_parallel_size",
            f"{context} needs Transformer Engine's attention; set megatron.transformer_impl: "
            "transformer_engine and model.attention: megatron, or model.attention: te, or "
            "megatron.context_parallel_size: 1",
        )
    ranks = whole(megatron.get("tensor_model_parallel_size")) or 1
    length = whole(megatron.get("seq_length")) or model.max_position_embeddings
    if megatron.get("sequence_parallel") is True and ranks > 1 and length and length % ranks:
        set_here = megatron.get("seq_length") is not None
        yield (
            "megatron.seq_length" if set_here else "model.max_position_embeddings",
            f"{length} tokens do not divide into {ranks} equal parts, which "
            f"megatron.sequence_parallel with tensor_model_parallel_size {ranks} needs; "
            f"allowed: a multiple of {ranks}, or megatron.sequence_parallel: false",
        )


def _torch_layers(attention: str, megatron: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what torch's attention and norms, the layers of `attention: auto | sdpa`, cannot do."""
    elsewhere = "set model.attention: megatron"
    if megatron.get("apply_layernorm_1p") is True:
        yield (
            "megatron.apply_layernorm_1p",
            "true needs norms with a zero-centred gamma, which torch's, used with "
            f"model.attention: {attention}, do not have; {elsewhere}, or "
            "megatron.apply_layernorm_1p: false",
        )
    window = megatron.get("window_size")
    if window is not None:
        yield (
            "megatron.window_size",
            f"{shown(window)}: torch's attention, used with model.attention: {attention}, has no "
            f"sliding window; {elsewhere}, or remove the key",
        )
    softmax = megatron.get("softmax_type")
    if softmax not in (None, "vanilla"):
        yield (
            "megatron.softmax_type",
            f"{shown(softmax)}: torch's attention, used with model.attention: {attention}, has "
            f"only vanilla; {elsewhere}, or megatron.softmax_type: vanilla",
        )
