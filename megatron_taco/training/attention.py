"""Core attention by torch's scaled-dot-product attention.

Megatron's local layer spec computes attention unfused, with the whole score matrix in memory.  This
module takes its place: on GPUs torch picks its flash or cuDNN kernel, on CPUs its flash kernel.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class TorchAttention(MegatronModule):
    """Causal (or full) attention of one layer's local heads; no parameters.

    Raises:
        ValueError: for settings that torch's attention cannot express (context parallelism,
            sliding windows, a softmax offset), naming the setting.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        unsupported = {
            "context_parallel_size": config.context_parallel_size > 1,
            "window_size": getattr(config, "window_size", None) is not None,
            "softmax_type": getattr(config, "softmax_type", "vanilla") != "vanilla",
        }
        for setting, present in unsupported.items():
            if present:
                raise ValueError(
                    f"model.attention: sdpa has no {setting}={getattr(config, setting)!r}; "
                    "use transformer_impl: transformer_engine, or model.attention: megatron"
                )
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # Query-key layer scaling divides the scores by the layer's number and multiplies them
        # again before the softmax, for FP16's sake: torch's kernels need no such help.
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [sq, b, heads, d] of this rank's heads.
            key: [sk, b, groups, d]; ``heads`` is a multiple of ``groups``.
            value: [sk, b, groups, d].
            attention_mask: boolean, broadcastable to [b, heads, sq, sk], True where masked; None
                with a causal mask type means the plain causal mask.
            attn_mask_type: overrides the layer's own mask type.
            attention_bias: added to the scores, or None.
            packed_seq_params: must be None.

        Returns:
            [sq, b, heads * d].
        """
        if packed_seq_params is not None:
            raise ValueError("model.attention: sdpa does not take packed sequences")
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        mask = None
        if attention_bias is not None or (attention_mask is not None and not causal):
            mask = attention_bias
            if attention_mask is not None:
                mask = ~attention_mask if mask is None else mask.masked_fill(attention_mask, -1e30)
        dropout = self.dropout if self.training else 0.0
        # Each tensor-parallel rank drops different heads' scores: its own random stream, as in
        # Megatron; under sequence parallelism the default stream differs between ranks already.
        stream = contextlib.nullcontext()
        if dropout > 0.0 and not self.config.sequence_parallel:
            stream = tensor_parallel.get_cuda_rng_tracker().fork()
        with stream:
            context = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal and mask is None and query.size(0) > 1,
                scale=self.scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()
