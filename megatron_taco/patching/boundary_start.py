"""What boundaries take from a model that has just been initialised: its token embedding.

Anchors begin as the embedding, as far as their kind can represent it (papers.md 4.2): the token's
signal is there from the first step. The embedding lives on the first stage, in rows over the
tensor-parallel ranks, and tables on every rank of every stage, so that it is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Chain

ROWS = 4096
"""Rows of the embedding that are sent at a time."""


def start_anchors(
    chains: Iterable[Chain],
    weight: Tensor | None,
    tensor_group: dist.ProcessGroup,
    pipeline_group: dist.ProcessGroup,
) -> None:
    """Set the trainable anchors of all chains; every rank of the model calls it.

    Args:
        chains: of this process, at least one; cast to the model's dtype.
        weight: this rank's rows of the embedding, [V / tensor-parallel size, d] of the model's
            dtype, on the first stage; None elsewhere.
        tensor_group: holds the other rows, in the order of its ranks.
        pipeline_group: its first rank is the first stage.
    """
    chains = list(chains)
    settings = chains[0].settings
    tables = [anchor for chain in chains for anchor in chain.trainable_anchors]
    if not tables:
        return
    like = next(tables[0].parameters())
    ranks = tensor_group.size()
    rows = settings.vocab // ranks
    source = dist.get_global_rank(pipeline_group, 0)
    for at in range(0, rows, ROWS):
        shape = (min(ROWS, rows - at), settings.hidden)
        part = torch.empty(shape, dtype=like.dtype, device=like.device)
        if weight is not None:
            part.copy_(weight.detach()[at : at + ROWS])
        if pipeline_group.size() > 1:
            dist.broadcast(part, src=source, group=pipeline_group)
        parts = [torch.empty_like(part) for _ in range(ranks)]
        if ranks > 1:
            dist.all_gather(parts, part, group=tensor_group)
        else:
            parts = [part]
        for rank, each in enumerate(parts):
            for table in tables:
                table.start_from_embedding(each, first=rank * rows + at)
