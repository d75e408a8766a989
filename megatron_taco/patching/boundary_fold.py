"""Whether a model's boundaries can be put into its own weights, and doing so.

A boundary acts on the residual stream, which every later layer reads through a norm and adds to:
no weight of a GPT model multiplies it alone. So no linear layer beside it can hold a projector, or
a code. What can be folded is a boundary that changes nothing:

- ``subspace``: what crosses lies in the subspace, all but the fixed table, which becomes part of
  the embedding;
- an orthonormal projector of full rank (rank = hidden size) without anchors: A A' = I.

Both only where nothing is quantised on the way forward; then the model without boundaries computes
the same up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_taco.boundaries import BoundarySettings
from megatron_taco.boundaries.build import ELEMENTWISE
from megatron_taco.patching.boundary_chunk import ChunkBoundaries


def obstacle(settings: BoundarySettings) -> str | None:
    """Why a model is another one without these boundaries; None if it is the same to rounding.

    Args:
        settings: of the model's boundaries.
    """
    if settings.kind in ELEMENTWISE:
        return f"{settings.kind} rounds the activations, which no weight does"
    if settings.forward.kind != "none":
        return f"{settings.forward.kind} rounds what crosses, which no weight does"
    if settings.kind == "subspace":
        return None
    if settings.kind == "residual_bottleneck":
        return "its encoder and decoder are layers of their own, on the residual stream"
    if settings.rank < settings.hidden:
        return (
            f"a projection of rank {settings.rank} acts on the residual stream of size "
            f"{settings.hidden}, which all later layers read and add to: no linear layer has it "
            "alone"
        )
    if settings.anchors in ("full", "factorised"):
        return "the anchors of two segments differ, so that each token is moved at a boundary"
    if settings.kind == "learned_unconstrained":
        return "its projector is not orthonormal"
    return None


@torch.no_grad()
def fold(model: Any, chunk: ChunkBoundaries) -> None:
    """Take the boundaries out of a ``GPTModel`` that is in one piece, and put in what they leave.

    Args:
        model: the model.
        chunk: its boundaries, all in place.
    """
    fixed = chunk.fixed_table
    if fixed is not None:
        weight = model.embedding.word_embeddings.weight
        weight.copy_(weight.float() + fixed.float())
    chunk.detach(model)
