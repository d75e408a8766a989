"""Section `model`: the architecture, by Megatron's own argument names, or a preset of it."""

from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import Field

from megatron_taco.config.presets import PRESETS
from megatron_taco.config.section import Section

REQUIRED: Final = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


class Model(Section):
    """The architecture. An explicit key overrides the preset's.

    Every key but `preset` and `attention` is a Megatron argument, with Megatron's own default
    where neither the file nor the preset sets it (None here).

    Attributes:
        preset: Name of a preset, already resolved into the keys below.
        attention: Whose attention and norms: `sdpa` is PyTorch's, `te` Transformer Engine's,
            both with Megatron's linears; `megatron` leaves the layers to Megatron
            (`megatron.transformer_impl`). `auto` is `megatron` with
            `transformer_impl: transformer_engine`, else `sdpa`.
        vocab_size: Rows of the embedding before padding; the tokenizer's if not set.
    """

    preset: str | None = None
    attention: Literal["auto", "sdpa", "megatron", "te"] = "auto"
    num_layers: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=1)
    ffn_hidden_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_query_groups: int | None = Field(default=None, ge=1)
    kv_channels: int | None = Field(default=None, ge=1)
    max_position_embeddings: int | None = Field(default=None, ge=1)
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = None
    rotary_base: int | None = Field(default=None, ge=1)
    rotary_percent: float | None = Field(default=None, gt=0, le=1)
    normalization: Literal["LayerNorm", "RMSNorm"] | None = None
    norm_epsilon: float | None = Field(default=None, gt=0)
    swiglu: bool | None = None
    add_bias_linear: bool | None = None
    add_qkv_bias: bool | None = None
    qk_layernorm: bool | None = None
    untie_embeddings_and_output_weights: bool | None = None
    init_method_std: float | None = Field(default=None, gt=0)
    make_vocab_size_divisible_by: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=1)

    def layers(self, transformer_impl: object) -> Literal["sdpa", "megatron", "te"]:
        """Return whose layers are built: `attention` with `auto` resolved.

        Args:
            transformer_impl: Megatron's argument, None where it is not set.
        """
        if self.attention != "auto":
            return self.attention
        return "sdpa" if transformer_impl in (None, "local") else "megatron"

    def arguments(self) -> dict[str, Any]:
        """Return the Megatron arguments that the file or the preset sets, by Megatron's names."""
        return {
            name: getattr(self, name) for name in ARCHITECTURE if getattr(self, name) is not None
        }

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield sizes that are missing or do not fit each other."""
        for name in REQUIRED:
            if getattr(self, name) is None:
                yield name, "required; give it, or a preset that has it"
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads and groups and heads % groups:
            yield "num_query_groups", f"{groups} does not divide num_attention_heads ({heads})"
        if heads and self.hidden_size and self.kv_channels is None and self.hidden_size % heads:
            yield (
                "num_attention_heads",
                f"{heads} does not divide hidden_size ({self.hidden_size}); "
                "change one of them or set kv_channels",
            )
        if self.add_bias_linear and self.add_qkv_bias is False:
            yield (
                "add_qkv_bias",
                "false contradicts add_bias_linear: true, which gives every linear layer a bias",
            )

    def plain(self) -> dict[str, Any]:
        """Return the section with the preset resolved.

        A key that is not set is left out, unless the preset sets it: then null takes it away.
        """
        taken_away = dict.fromkeys(PRESETS.get(self.preset or "", {}))
        return {**taken_away, **super().plain()}


ARCHITECTURE: Final = tuple(
    name for name in Model.model_fields if name not in ("preset", "attention")
)
"""Keys of `model` that are Megatron arguments, each under Megatron's own name."""
