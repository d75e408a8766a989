"""How many bytes a collective makes a rank send, plain and compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one collective, or reads from its peers.

    Attributes:
        raw: What a ring would send for the plain tensor, whatever the backend really does.
        wire: What the compressed collective sends.
        inter_node: What of ``wire`` goes to other nodes, where the group is known to span some.
    """

    raw: int
    wire: int
    inter_node: int = 0


def slice_elements(numel: int, world_size: int, block: int) -> int:
    """Returns the elements of a two-shot all-reduce's slice: whole blocks, the same on all ranks.

    Args:
        numel: Elements of the tensor.
        world_size: Number of ranks, P.
        block: Elements of a block, B.

    Returns:
        ``ceil(ceil(numel / B) / P) * B``. P slices hold the tensor and, after it, zeros.
    """
    blocks = -(-numel // block)
    return -(-blocks // world_size) * block


def traffic(
    op: str,
    algorithm: str,
    numel: int,
    itemsize: int,
    world_size: int,
    payload_bytes: Callable[[int], int],
    *,
    block: int,
    nodes: int = 1,
) -> Traffic:
    """Returns what this rank sends; it is the same on all ranks.

    Args:
        op: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        algorithm: ``one_shot``, ``peer_read`` (as many bytes, read instead of sent), ``two_shot``
            or ``hierarchical``; read for ``all_reduce`` only.
        numel: Elements of the whole tensor: of the input of a reduce-scatter, of the output of
            an all-gather.
        itemsize: Bytes of an element.
        world_size: Number of ranks of the group, P.
        payload_bytes: Bytes that the compressor makes of so many elements.
        block: The compressor's block, in elements.
        nodes: Nodes of equally many ranks that the group spans.

    Returns:
        The bytes. ``raw`` is 2(P-1)/P of the tensor for an all-reduce (rounded up to a byte) and
        P-1 slices for the others.

    Raises:
        ValueError: ``op`` or ``algorithm`` is unknown, or the tensor has no P equal slices, or the
            group no ``nodes`` equal nodes.
    """
    if world_size % nodes:
        raise ValueError(f"a group of {world_size} has not {nodes} equal nodes")
    others = world_size - 1
    local = world_size // nodes
    away = world_size - local
    if op == "all_reduce":
        raw = -(-2 * others * numel * itemsize // world_size)
        if world_size == 1 or numel == 0:
            return Traffic(raw, 0)
        if algorithm in ("one_shot", "peer_read"):
            payload = payload_bytes(numel)
            return Traffic(raw, others * payload, away * payload)
        payload = payload_bytes(slice_elements(numel, world_size, block))
        if algorithm == "two_shot":
            return Traffic(raw, 2 * others * payload, 2 * away * payload)
        if algorithm == "hierarchical":
            across = 2 * (nodes - 1) * payload
            return Traffic(raw, 2 * (local - 1) * nodes * payload + across, across)
        raise ValueError(
            f"algorithm: got {algorithm!r}, allowed: one_shot, two_shot, hierarchical, peer_read"
        )
    if op not in ("reduce_scatter", "all_gather"):
        raise ValueError(f"op: got {op!r}, allowed: all_reduce, reduce_scatter, all_gather")
    if numel % world_size:
        raise ValueError(f"{op} of {numel} elements: not {world_size} equal slices")
    width = numel // world_size
    payload = payload_bytes(width) if width else 0
    return Traffic(others * width * itemsize, others * payload, away * payload)


def buffer_bytes(
    op: str,
    algorithm: str,
    numel: int,
    world_size: int,
    payload_bytes: Callable[[int], int],
    *,
    block: int,
) -> int:
    """Returns the bytes of the messages that a rank holds in one call, sent and received.

    One-shot: the payload of every rank. Peer reads: two slots of a payload each, which stay.
    Two-shot and hierarchical: what is sent, what arrives and what is gathered, each a payload of
    the whole tensor (hierarchical less, by its nodes).
    Reduce-scatter: what is sent and what arrives. All-gather: what is gathered.

    Args:
        op: As for :func:`traffic`.
        algorithm: Likewise.
        numel: Likewise.
        world_size: Likewise.
        payload_bytes: Likewise.
        block: Likewise.
    """
    if op == "all_reduce" and algorithm == "one_shot":
        return world_size * payload_bytes(numel)
    if op == "all_reduce" and algorithm == "peer_read":
        return 2 * payload_bytes(numel)
    times = {"all_reduce": 3, "reduce_scatter": 2, "all_gather": 1}[op]
    width = slice_elements(numel, world_size, block) if op == "all_reduce" else numel // world_size
    return times * world_size * payload_bytes(width)
