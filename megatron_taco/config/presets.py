"""Named architectures and their number of parameters."""

from collections.abc import Mapping
from typing import Any, Final

from megatron_taco.config.preset_table import TABLE

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = TABLE

PUBLISHED: Final[dict[str, int]] = {
    # Exact, from the model cards' safetensors index (weights are BF16, two bytes each).
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    # Nominal: what the name says (GPT-3 table 2.1; MAPL's set-up).
    "gpt-350m": 350_000_000,
    "gpt-1.3b": 1_300_000_000,
    "gpt-6.7b": 6_700_000_000,
    "llama-150m": 150_000_000,
    "llama-500m": 500_000_000,
    "llama-1b": 1_000_000_000,
}
"""Published number of parameters of each preset that was published."""


def count_parameters(arguments: Mapping[str, Any], vocab_size: int) -> int:
    """Return the number of parameters of Megatron's GPT model, whatever the parallel layout.

    Per layer, with hidden size h, n heads of c channels, g query groups, feed-forward width f:
    q and output projection 2*h*n*c, k and v 2*h*g*c, MLP 2*h*f (3*h*f with SwiGLU), two norms of h,
    and the biases; a LayerNorm has 2 parameters per channel, an RMSNorm 1. Then the embedding
    V*h, once more if the output layer is untied, the learned positions L*h, and a last norm.

    Args:
        arguments: Megatron arguments (`Model.arguments()`); missing ones have Megatron's default.
        vocab_size: Rows of the embedding, padding included.
    """
    h, n = int(arguments["hidden_size"]), int(arguments["num_attention_heads"])
    swiglu = bool(arguments.get("swiglu", False))
    bias = bool(arguments.get("add_bias_linear", True))
    qkv_bias = bias or bool(arguments.get("add_qkv_bias", False))
    c = int(arguments.get("kv_channels") or h // n)
    g = int(arguments.get("num_query_groups") or n)
    # Megatron's default width: 4h, or 2/3 of it rounded down to a multiple of 64 with SwiGLU.
    default_width = int((4 * h * 2 / 3) / 64) * 64 if swiglu else 4 * h
    f = int(arguments.get("ffn_hidden_size") or default_width)
    per_norm_channel = 1 if arguments.get("normalization", "LayerNorm") == "RMSNorm" else 2
    up = 2 * f if swiglu else f

    attention = 2 * h * n * c + 2 * h * g * c
    mlp = h * up + f * h
    biases = (n + 2 * g) * c * qkv_bias + (h + up + h) * bias
    norms = 2 * h * per_norm_channel
    if arguments.get("qk_layernorm", False):
        norms += 2 * c * per_norm_channel
    layer = attention + mlp + biases + norms

    embeddings = vocab_size * h
    if arguments.get("untie_embeddings_and_output_weights", False):
        embeddings *= 2
    if arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        embeddings += int(arguments["max_position_embeddings"]) * h
    return int(arguments["num_layers"]) * layer + embeddings + h * per_norm_channel
