"""What a Subspace Network's weights and optimiser cannot be, with what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_taco.config.messages import shown
from megatron_taco.config.pipeline_parallel import SUBSPACE

_BOUNDARY = f"compression.pipeline_parallel.boundary: {SUBSPACE}"
_STREAM = "all that is added to the residual stream has to lie in the subspace"


@dataclass(frozen=True)
class _Rule:
    """An argument of Megatron that such a network cannot have.

    Attributes:
        name: Megatron's name of it.
        default: What Megatron takes where it is not given.
        refuses: Tells a value that does not go.
        reason: Why.
        change: A value that does, or what to do.
    """

    name: str
    default: Any
    refuses: Callable[[Any], bool]
    reason: str
    change: str


def _on(value: Any) -> bool:
    return value is True


def _some(value: Any) -> bool:
    return value not in (None, False, 0)


_RULES = (
    _Rule(
        "use_distributed_optimizer",
        False,
        _on,
        "a rank's flat shard holds parts of matrices, which cannot be put into the subspace",
        "false",
    ),
    _Rule(
        "use_layer_wise_distributed_optimizer",
        False,
        _on,
        "its ranks hold the masters of other ranks' weights, which cannot be put into the subspace",
        "false",
    ),
    _Rule(
        "optimizer",
        "adam",
        lambda value: str(value).startswith("dist_"),
        "its ranks hold the masters of other ranks' weights, which cannot be put into the subspace",
        "adam, sgd or muon",
    ),
    _Rule(
        "hidden_dropout", 0.1, lambda value: bool(value), f"{_STREAM}, and dropout leaves it", "0"
    ),
    _Rule(
        "position_embedding_type",
        "learned_absolute",
        lambda value: value == "learned_absolute",
        f"{_STREAM}, and learned positions do not",
        "rope",
    ),
    _Rule(
        "untie_embeddings_and_output_weights",
        False,
        lambda value: not value,
        "a tied output layer would be held in the subspace, too",
        "true",
    ),
    _Rule(
        "apply_residual_connection_post_layernorm",
        False,
        _on,
        f"{_STREAM}, and a norm in it leaves it",
        "false",
    ),
    _Rule(
        "num_experts",
        None,
        _some,
        "the output projections of experts are not constrained here",
        "no experts",
    ),
    _Rule(
        "mtp_num_layers",
        None,
        _some,
        "the embedding of multi-token prediction lacks the fixed table",
        "none",
    ),
)


def problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (Megatron's argument, message) for what does not go with ``boundary: subspace``.

    Args:
        arguments: Megatron's, by its own names; where one is missing Megatron's default counts.
    """
    for rule in _RULES:
        value = arguments.get(rule.name)
        found = rule.default if value is None else value
        if rule.refuses(found):
            default = " (Megatron's default)" if value is None else ""
            yield (
                rule.name,
                f"{shown(found)}{default} does not go with {_BOUNDARY}: {rule.reason}; "
                f"allowed: {rule.change}",
            )
