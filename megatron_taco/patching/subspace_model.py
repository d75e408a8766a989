"""What a Subspace Network asks of the model around its boundaries (papers.md 3.1).

    x_0 = T[ids] + F[ids]    the fixed table F is added to what the embedding gives
    W = U U' W               output projections and biases of attention and MLP, after every step
    T = T U U'               the trainable embedding, after every step
    Adam's second moments    their mean along the hidden dimension, after every step

Constrained are all layers before the last boundary, and as in the authors' code all further ones
but the last two of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_taco.boundaries.subspace import Subspace
from megatron_taco.patching.errors import BoundaryError

FREE = 2
"""Layers at the model's end that stay unconstrained, unless a boundary comes after them."""

_OUTPUTS = re.compile(r"(self_attention\.linear_proj|mlp\.linear_fc2)\.(weight|bias)")


@dataclass(frozen=True)
class Constrained:
    """A parameter that has to stay in the subspace.

    Attributes:
        name: in its model chunk.
        parameter: the model's own; ``main_param`` of it is the FP32 master, where there is one.
        embedding: whether rows are vectors [V, d]; else columns are, [d, inputs], or it is one [d].
    """

    name: str
    parameter: nn.Parameter
    embedding: bool


def constrained(model: Any, depths: Sequence[int]) -> list[Constrained]:
    """The parameters of a ``GPTModel`` that have to stay in the subspace.

    Args:
        model: a chunk of the model.
        depths: of all boundaries.

    Raises:
        BoundaryError: a layer is not made of attention and MLP that end in one linear each.
    """
    found = []
    if model.pre_process:
        weight = model.embedding.word_embeddings.weight
        found.append(Constrained("embedding.word_embeddings.weight", weight, True))
    last = max(*depths, model.config.num_layers - FREE)
    for layer in model.decoder.layers:
        if layer.layer_number > last:
            continue
        names = {}
        for name, parameter in layer.named_parameters():
            if _OUTPUTS.fullmatch(name):
                names[name] = parameter
        weights = [name for name in names if name.endswith(".weight")]
        if len(weights) != 2:
            raise BoundaryError(
                f"compression.pipeline_parallel.boundary: subspace: layer {layer.layer_number} has "
                f"the output projections {weights or 'none'}, expected one of attention "
                "(self_attention.linear_proj) and one of the MLP (mlp.linear_fc2): only such "
                "layers can be kept in the subspace"
            )
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        found += [Constrained(prefix + name, names[name], False) for name in names]
    return found


@torch.no_grad()
def constrain(parameters: Sequence[Constrained], boundary: Subspace) -> None:
    """Project parameters on the subspace in place, FP32 masters first and the model's from them.

    Args:
        parameters: of this process.
        boundary: any of its boundaries: all have the same subspace.
    """
    for each in parameters:
        updated = _updated(each.parameter)
        if each.embedding:
            boundary.constrain_embedding_(updated)
        else:
            boundary.constrain_output_(updated)
        if updated is not each.parameter:
            each.parameter.copy_(updated)


@torch.no_grad()
def level_moments(
    parameters: Sequence[Constrained], boundary: Subspace, optimizers: Sequence[Any]
) -> None:
    """Make Adam's second moments constant along the hidden dimension, in place.

    Args:
        parameters: of this process.
        boundary: any of its boundaries.
        optimizers: Megatron's, chains of them included; others than Adam have nothing to level.
    """
    states = [optimizer.state for optimizer in _torch_optimizers(optimizers)]
    for each in parameters:
        for state in states:
            moment = state.get(_updated(each.parameter), {}).get("exp_avg_sq")
            if moment is not None:
                boundary.level_second_moment_(moment, -1 if each.embedding else 0)


def _updated(parameter: nn.Parameter) -> Tensor:
    """What the optimiser updates: the FP32 master if there is one, else the parameter itself."""
    master = getattr(parameter, "main_param", None)
    return parameter if master is None else master


def _torch_optimizers(optimizers: Sequence[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        inner = getattr(optimizer, "chained_optimizers", None)
        if inner is not None:
            yield from _torch_optimizers(inner)
        elif isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            yield optimizer.optimizer
