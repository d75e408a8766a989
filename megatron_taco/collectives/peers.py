"""Which groups can read each other's memory, and the memory that they do it through."""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_taco.collectives import symmetric
from megatron_taco.collectives.nodes import HOST_VARIABLE, node_id, places
from megatron_taco.collectives.peer_buffer import PeerBuffer
from megatron_taco.compressors import Compressor

OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own switch for ranks that share a GPU."""


class RankFacts(NamedTuple):
    """What a rank tells the others.

    Attributes:
        node: What its host is called.
        problem: What it knows to be wrong at its end, if anything.
        ordinal: The index of its GPU, as it numbers them.
        uuid: The GPU's own name.
        shares: Whether torch is told to let ranks share a GPU.
    """

    node: str
    problem: str | None
    ordinal: int
    uuid: str
    shares: bool


class PeerMemory:
    """Finds out once for each group whether its ranks read each other's memory; keeps the buffer.

    The second is of two slots of the group's largest payload, on every rank.
    """

    def __init__(self, node: str | None = None) -> None:
        """Remembers what this rank's node is called; by default :func:`nodes.node_id`."""
        self._node = node_id() if node is None else node
        self._known: dict[ProcessGroup, PeerBuffer | str] = {}

    def require(
        self, group: ProcessGroup, compressor: Compressor, device: torch.device
    ) -> PeerBuffer:
        """Returns the buffer of a group.

        The first call for a group is collective: all its ranks make it, and make no other call
        on it meanwhile. It waits for the host. All ranks come to the same answer.

        Args:
            group: The group, of two ranks or more.
            compressor: What encodes.
            device: Where this rank's tensors are.

        Raises:
            ValueError: They cannot, with the reason and what to change.
        """
        found = self._known.get(group)
        if found is None:
            found = self._known[group] = self._make(group, compressor, device)
        if isinstance(found, PeerBuffer):  # of any compressor, not of the first one alone
            found = compressor.peer_problem(device) or found
        if isinstance(found, str):
            raise ValueError(
                f"algorithm: peer_read needs ranks that read each other's GPU memory; {found}; "
                "allowed here: auto, one_shot, two_shot"
            )
        return found

    def _make(
        self, group: ProcessGroup, compressor: Compressor, device: torch.device
    ) -> PeerBuffer | str:
        ranks = _gathered(group, self._about(compressor, device))
        if problem := group_problem(ranks):
            return problem
        if problem := _first(_gathered(group, _unreachable(ranks, group.rank(), device))):
            return problem
        buffer = PeerBuffer(partial(symmetric.map_memory, group, device), device)
        return _first(_gathered(group, _trial(buffer))) or buffer

    def _about(self, compressor: Compressor, device: torch.device) -> RankFacts:
        if device.type != "cuda":
            problem: str | None = f"its tensors are on {device.type}; run on GPUs"
        else:
            problem = symmetric.unavailable(device) or compressor.peer_problem(device)
        if problem is not None:
            return RankFacts(self._node, problem, -1, "", False)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        shares = os.environ.get(OVERLAP_VARIABLE, "0") != "0"
        return RankFacts(self._node, None, _index(device), uuid, shares)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _gathered[T](group: ProcessGroup, value: T) -> list[T]:
    """What each rank of the group has."""
    found: list[T] = [value] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _first(problems: list[str | None]) -> str | None:
    """The first rank's problem, if there is one."""
    return next((f"rank {r}: {problem}" for r, problem in enumerate(problems) if problem), None)


def group_problem(ranks: list[RankFacts]) -> str | None:
    """Says what is wrong with what the ranks of a group told each other, the same on all of them.

    Returns:
        The problem and what to change, or None.
    """
    if problem := _first([rank.problem for rank in ranks]):
        return problem
    nodes = places([rank.node for rank in ranks])
    if len(nodes) > 1:
        shown = ", ".join(f"{ranks[found[0]].node!r}: {len(found)}" for found in nodes[:8])
        return (
            f"the group of {len(ranks)} is on {len(nodes)} hosts (host: ranks) {shown} (a host "
            f"name, or {HOST_VARIABLE} where that is set); keep tensor parallelism on one host"
        )
    # torch compares indices: ranks that see one GPU each all call it 0.
    sharing = places([str(rank.ordinal) for rank in ranks])
    if len(sharing) < len(ranks) and not all(rank.shares for rank in ranks):
        both = next(found for found in sharing if len(found) > 1)
        return (
            f"ranks {both[0]} and {both[1]} both use the device of index "
            f"{ranks[both[0]].ordinal}; give each rank a GPU, with all of the host's GPUs in "
            "CUDA_VISIBLE_DEVICES"
        )
    return None


def _unreachable(ranks: list[RankFacts], rank: int, device: torch.device) -> str | None:
    """Says which peer's GPU this rank's cannot access, of those that this rank sees."""
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    mine = ranks[rank]
    for other, peer in enumerate(ranks):
        index = visible.get(peer.uuid)
        if index is None or peer.uuid == mine.uuid:
            continue
        if not torch.cuda.can_device_access_peer(_index(device), index):
            return f"its GPU has no peer access to that of rank {other}"
    return None


def _trial(buffer: PeerBuffer) -> str | None:
    """Says why memory cannot be mapped, by mapping a little."""
    try:
        buffer.reserve(1)
    except RuntimeError as error:
        return str(error)
    return None
