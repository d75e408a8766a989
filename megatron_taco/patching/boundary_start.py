"""What boundaries begin with: the same bits everywhere, and the model's token embedding.

What comes of a QR decomposition is made by one rank and sent to all others once: hosts with other
processors or libraries round it otherwise. Elementwise draws are rounded to FP32 from FP64.

Anchors begin as the embedding, as far as their kind can represent it (papers.md 4.2): the token's
signal is there from the first step. The embedding lives on the first stage, in rows over the
tensor-parallel ranks, and tables on every rank of every stage, so that it is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Chain
from megatron_taco.boundaries.anchors import FactorisedAnchor
from megatron_taco.boundaries.build import PROJECTED
from megatron_taco.boundaries.subspace import Subspace

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


def share_drawn(chains: Iterable[Chain], copy: int, device: torch.device) -> None:
    """Give all ranks the same projectors and anchor bases; a collective call of the world.

    Args:
        chains: of this process, at least one.
        copy: number of this process among those that hold the same part of the model; 0 sends.
        device: of the collectives.
    """
    chains = list(chains)
    settings, count = chains[0].settings, chains[0].count
    drawn: dict[str, list[_Drawn]] = {}
    if settings.kind == Subspace.kind:
        drawn["projector 0"] = []
    elif settings.kind in PROJECTED:
        drawn |= {f"projector {number}": [] for number in range(1, count + 1)}
    if settings.anchors == "factorised":
        drawn |= {f"basis {segment}": [] for segment in range(count + 1)}
    for chain in chains:
        for name, each in _held(chain):
            drawn[name].append(each)
    for name, found in drawn.items():
        shape = (settings.hidden, settings.rank)
        shape = shape if name.startswith("projector") else shape[::-1]
        sent = torch.zeros(shape, device=device)
        for each in found:
            if each.sends and not copy:
                sent.copy_(each.tensor)
        # One rank has values, all others zeros.
        dist.all_reduce(sent)
        for each in found:
            each.tensor.copy_(sent)


class _Drawn(NamedTuple):
    """A buffer that was drawn, and whether its copy in a model's first replica is the one sent."""

    tensor: Tensor
    sends: bool


def _held(chain: Chain) -> Iterator[tuple[str, _Drawn]]:
    for segment in range(chain.first, chain.last + 1):
        anchor = chain.anchor(segment)
        if isinstance(anchor, FactorisedAnchor):
            yield f"basis {segment}", _Drawn(anchor.basis, True)
    for number in range(1, chain.count + 1):
        boundary = chain.boundary(number)
        if boundary is not None and boundary.projector is not None:
            projector = boundary.projector
            # All boundaries of a Subspace Network begin with one: the first of them sends it.
            sends = boundary.place.ends != "receiver" and projector.boundary in (number, number - 1)
            yield f"projector {projector.boundary}", _Drawn(projector.a, sends)
