"""The architectures of the presets, by Megatron's own argument names. Data only.

Where the sizes come from:

- gpt-350m, gpt-1.3b, gpt-6.7b: GPT-3 "Medium", "XL" and "6.7B" (Brown et al. 2020, table 2.1), with
  the GPT-2 vocabulary of 50,257. 350M is the recipe of TACO's authors: 24 layers, hidden 1024,
  16 heads, 2048 tokens. The XL has 16 heads of 128 here: the paper's 24 heads of 128 are not 2048.
- qwen2.5-*, qwen3-*: the `config.json` that is published with each model.
- llama-150m, llama-500m, llama-1b: the set-up of MAPL gives hidden size 1024 / 1536 / 2048, a
  vocabulary of 32,000, 2048 tokens, RoPE, RMSNorm and SwiGLU, and leaves depth and feed-forward
  width open. Chosen here: the output layer is untied, as LLaMA's; the depth is a multiple of 8, so
  that both of the paper's pipeline sizes (4 and 8) cut it evenly; heads have 64 channels; and the
  feed-forward width is the multiple of 256 that brings the total nearest to the name
  (149.4M, 494.7M, 1003.5M).
- gpt-reference: the laboratory's own model for measuring, not published anywhere.
- gpt-tiny: for a demonstration on a CPU.
"""

from typing import Any, Final

_GPT: Final[dict[str, Any]] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "init_method_std": 0.02,
}
_GPT2_VOCABULARY: Final[dict[str, Any]] = {
    "max_position_embeddings": 2048,
    "vocab_size": 50257,
    "make_vocab_size_divisible_by": 128,
}
_LLAMA: Final[dict[str, Any]] = {
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "init_method_std": 0.02,
    # The vocabularies below divide evenly among 2, 4 and 8 ranks as they are. Padding to a
    # multiple of 128 per rank would change the published number of parameters.
    "make_vocab_size_divisible_by": 1,
}
_MAPL: Final[dict[str, Any]] = {
    **_LLAMA,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "untie_embeddings_and_output_weights": True,
}
_QWEN25: Final[dict[str, Any]] = {
    **_LLAMA,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-6,
    "add_qkv_bias": True,
    "vocab_size": 151936,
}
_QWEN3: Final[dict[str, Any]] = {
    **_LLAMA,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "kv_channels": 128,
    "num_query_groups": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}

TABLE: Final[dict[str, dict[str, Any]]] = {
    "gpt-tiny": {
        **_GPT,
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "make_vocab_size_divisible_by": 8,
    },
    "gpt-reference": {
        **_GPT,
        "num_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "make_vocab_size_divisible_by": 1,
    },
    "gpt-350m": {
        **_GPT,
        **_GPT2_VOCABULARY,
        "num_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
    },
    "gpt-1.3b": {
        **_GPT,
        **_GPT2_VOCABULARY,
        "num_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
    },
    "gpt-6.7b": {
        **_GPT,
        **_GPT2_VOCABULARY,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
    },
    "qwen2.5-0.5b": {
        **_QWEN25,
        "num_layers": 24,
        "hidden_size": 896,
        "ffn_hidden_size": 4864,
        "num_attention_heads": 14,
        "num_query_groups": 2,
        "max_position_embeddings": 32768,
        "untie_embeddings_and_output_weights": False,
    },
    "qwen2.5-1.5b": {
        **_QWEN25,
        "num_layers": 28,
        "hidden_size": 1536,
        "ffn_hidden_size": 8960,
        "num_attention_heads": 12,
        "num_query_groups": 2,
        "max_position_embeddings": 131072,
        "untie_embeddings_and_output_weights": False,
    },
    "qwen2.5-7b": {
        **_QWEN25,
        "num_layers": 28,
        "hidden_size": 3584,
        "ffn_hidden_size": 18944,
        "num_attention_heads": 28,
        "num_query_groups": 4,
        "max_position_embeddings": 131072,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 152064,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "num_layers": 28,
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "untie_embeddings_and_output_weights": False,
    },
    "qwen3-1.7b": {
        **_QWEN3,
        "num_layers": 28,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 16,
        "untie_embeddings_and_output_weights": False,
    },
    "qwen3-8b": {
        **_QWEN3,
        "num_layers": 36,
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 32,
        "untie_embeddings_and_output_weights": True,
    },
    "llama-150m": {
        **_MAPL,
        "num_layers": 8,
        "hidden_size": 1024,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 16,
    },
    "llama-500m": {
        **_MAPL,
        "num_layers": 16,
        "hidden_size": 1536,
        "ffn_hidden_size": 3328,
        "num_attention_heads": 24,
    },
    "llama-1b": {
        **_MAPL,
        "num_layers": 16,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
    },
}
