"""Which ranks of a group share a node, and the two kinds of sub-groups that follow from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

HOST_VARIABLE = "NCCL_HOSTID"
"""NCCL's own name for the host, which replaces the host name if it is set."""


@dataclass(frozen=True)
class NodeGroups:
    """This rank's sub-groups of a group with M nodes of L ranks, M and L above 1.

    Attributes:
        local: The L ranks of its node.
        across: The M ranks, one of each node, with its place in the node.
    """

    local: ProcessGroup
    across: ProcessGroup

    @property
    def count(self) -> int:
        """The number of nodes, M."""
        return self.across.size()


def node_id() -> str:
    """Returns what tells this rank's node from others: ``NCCL_HOSTID``, else the host name."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def places(ids: Sequence[str]) -> list[list[int]]:
    """Returns the ranks of each node, nodes in order of their first rank.

    Args:
        ids: The node of each rank of a group.
    """
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(ids):
        found.setdefault(name, []).append(rank)
    return list(found.values())


class Topology:
    """Finds out once for each group how its ranks lie on nodes, and keeps the sub-groups."""

    def __init__(self, node: str | None = None) -> None:
        """Remembers what this rank's node is called; by default :func:`node_id`."""
        self._node = node_id() if node is None else node
        self._known: dict[ProcessGroup, NodeGroups | str] = {}

    def of(self, group: ProcessGroup) -> NodeGroups | None:
        """Returns the sub-groups of a group, None if hierarchical collectives have no use there.

        The first call for a group is collective: all its ranks make it, and make no other call
        on it meanwhile. It waits for the host.
        """
        found = self._find(group)
        return None if isinstance(found, str) else found

    def require(self, group: ProcessGroup) -> NodeGroups:
        """Returns the sub-groups of a group.

        Raises:
            ValueError: They have no use there, or the nodes are not equal.
        """
        found = self._find(group)
        if isinstance(found, str):
            raise ValueError(
                f"algorithm: hierarchical needs a group of several nodes with equally many ranks, "
                f"two or more; this group of {group.size()} has {found} (a node is a host name, "
                f"or {HOST_VARIABLE} where that is set); allowed here: auto, one_shot, two_shot"
            )
        return found

    def _find(self, group: ProcessGroup) -> NodeGroups | str:
        if group not in self._known:
            self._known[group] = self._make(group)
        return self._known[group]

    def _make(self, group: ProcessGroup) -> NodeGroups | str:
        ids: list[str] = [""] * group.size()
        dist.all_gather_object(ids, self._node, group=group)
        nodes = places(ids)
        sizes = [len(ranks) for ranks in nodes]
        if len(nodes) == 1 or len(set(sizes)) > 1 or sizes[0] == 1:
            shown = ", ".join(f"{ids[r[0]]!r}: {len(r)}" for r in nodes[:8])
            more = f", and {len(nodes) - 8} nodes more" if len(nodes) > 8 else ""
            return f"(node: ranks) {shown}{more}"
        local = _split(group, nodes)
        across = _split(group, [list(ranks) for ranks in zip(*nodes, strict=True)])
        return NodeGroups(local, across)


def _split(group: ProcessGroup, parts: list[list[int]]) -> ProcessGroup:
    """Returns this rank's part of a group; only the group's ranks take part.

    Args:
        group: The group.
        parts: Its ranks, each in one part.
    """
    default = distributed_c10d._get_default_group()
    if default.bound_device_id is not None:
        # With a bound device new_group splits the default group's communicator, for which all
        # ranks of the world would be needed.
        made = dist.split_group(group, split_ranks=parts)
    else:
        mine = next(part for part in parts if group.rank() in part)
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(
            [ranks[r] for r in mine],
            backend=dist.get_backend(group),
            use_local_synchronization=True,
        )
    if not isinstance(made, ProcessGroup):
        raise RuntimeError(f"torch made no sub-group of {parts} for rank {group.rank()}: {made!r}")
    return made
