"""The groups of a two-hop reduce-scatter: the ranks of each node, and those at one place of all."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_taco.collectives.two_level import Nodes, nodes_of


def ranks_per_node(given: int | None) -> int:
    """Return how many ranks a node has: as configured, or as torchrun started them."""
    if given is not None:
        return given
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def make_nodes(group: ProcessGroup, per_node: int) -> Nodes | None:
    """Make the groups of both hops; every rank of the run has to call it, with its own group.

    Args:
        group: This rank's data-parallel group.
        per_node: Ranks of a node.

    Returns:
        None where two hops have no use (see :func:`nodes_of`), or nodes differ in size.
    """
    me = dist.get_rank()
    every: list[tuple[tuple[int, ...], int]] = [((), 0)] * dist.get_world_size()
    mine = tuple(dist.get_process_group_ranks(group))
    dist.all_gather_object(every, (mine, per_node))
    if len({size for _, size in every}) > 1:
        return None
    result = None
    for ranks in sorted({ranks for ranks, _ in every}):
        nodes = nodes_of(ranks, per_node)
        if nodes is None:
            continue
        by_node = [tuple(ranks[position] for position in node) for node in nodes]
        columns = list(zip(*by_node, strict=True))
        groups = {members: dist.new_group(list(members)) for members in (*by_node, *columns)}
        if ranks == mine:
            inner = next(groups[members] for members in by_node if me in members)
            outer = next(groups[members] for members in columns if me in members)
            result = Nodes(nodes, inner, outer)
    return result
