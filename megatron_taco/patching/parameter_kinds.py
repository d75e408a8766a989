"""What a parameter is, from its name and shape: the unit in which data-parallel traffic is chosen.

Never compressed are

* ``norm``: norms, biases and all else with one dimension (contract 5 of the design);
* ``replicated``: what every tensor-parallel rank holds a copy of. Each rank's bucket has other
  neighbours in its blocks, so copies would be rounded differently and drift apart;
* the weights of ``tied_embedding``: first and last pipeline stage hold a copy each, likewise. Their
  gradients are summed over both stages by Megatron afterwards, so those may be compressed.

For the rest the configuration says which kinds stay exact.
"""

from __future__ import annotations

from torch import Tensor

NORM, REPLICATED, TIED = "norm", "replicated", "tied_embedding"
KINDS = ("attention", "mlp", "embedding", TIED, "output_layer", "other", REPLICATED, NORM)
"""All kinds, in the order of the report."""

_BY_NAME_PART = (
    ("self_attention", "attention"),
    ("cross_attention", "attention"),
    ("mlp", "mlp"),
    ("embedding", "embedding"),
    ("word_embeddings", "embedding"),
    ("position_embeddings", "embedding"),
    ("output_layer", "output_layer"),
)


def kind_of(name: str, parameter: Tensor, tensor_parallel_size: int = 1) -> str:
    """Return the kind of a parameter of one of Megatron's models.

    Args:
        name: Its dotted name, as ``named_parameters`` gives it.
        parameter: The parameter, with the attributes that Megatron sets.
        tensor_parallel_size: Over how many ranks layers are split.
    """
    if parameter.dim() < 2:
        return NORM
    if tensor_parallel_size > 1 and not getattr(parameter, "tensor_model_parallel", False):
        return REPLICATED
    if getattr(parameter, "shared_embedding", False):
        return TIED
    parts = name.split(".")
    for part, kind in _BY_NAME_PART:
        if part in parts:
            return kind
    return "other"
