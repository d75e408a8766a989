"""What a parameter is, from its name and shape: the unit in which data-parallel traffic is chosen.

Contract 5 of the design: norms, biases and everything else with one dimension is never compressed;
for the rest the configuration says which kinds stay exact.
"""

from __future__ import annotations

from torch import Tensor

NORM = "norm"
KINDS = ("attention", "mlp", "embedding", "output_layer", "other", NORM)
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


def kind_of(name: str, parameter: Tensor) -> str:
    """Return the kind of a parameter of one of Megatron's models.

    Args:
        name: Its dotted name, as ``named_parameters`` gives it.
        parameter: The parameter; one with fewer than two dimensions is a ``norm``.
    """
    if parameter.dim() < 2:
        return NORM
    parts = name.split(".")
    for part, kind in _BY_NAME_PART:
        if part in parts:
            return kind
    return "other"
