"""Compressed all-reduce; the algorithms are in files of their own.

In all of them everyone decodes the same bytes, the owner of a slice included, so all ranks end
with bit-identical values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import checks, launch
from megatron_taco.collectives.chunks import plan
from megatron_taco.collectives.hierarchical import hierarchical
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.nodes import NodeGroups
from megatron_taco.collectives.one_shot import one_shot
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.collectives.two_shot import two_shot
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor

ALGORITHMS = ("one_shot", "two_shot", "hierarchical")


def choose_algorithm(world_size: int, algorithm: str, *, nodes: int = 1) -> str:
    """Returns the all-reduce algorithm: what is asked for, or the choice of ``auto``.

    A group that spans nodes with several ranks each sends least between them by ``hierarchical``.
    Else, at P = 2 one-shot and two-shot send the same number of bytes, and one-shot has one lossy
    step and one message fewer; above, two-shot sends fewer bytes.

    Args:
        world_size: Number of ranks of the group, P.
        algorithm: ``auto``, ``one_shot``, ``two_shot`` or ``hierarchical``.
        nodes: Nodes of equally many ranks, two or more, that the group spans; 1 if it does not.

    Returns:
        ``one_shot``, ``two_shot`` or ``hierarchical``.

    Raises:
        ValueError: ``algorithm`` is something else, or ``hierarchical`` in a group of one node.
    """
    if algorithm == "auto":
        if nodes > 1:
            return "hierarchical"
        return "one_shot" if world_size <= 2 else "two_shot"
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: got {algorithm!r}, allowed: auto, {', '.join(ALGORITHMS)}")
    if algorithm == "hierarchical" and nodes == 1:
        raise ValueError(
            f"algorithm: hierarchical needs the nodes of the group of {world_size} "
            "(Topology.require) and there are none; allowed: auto, one_shot, two_shot"
        )
    return algorithm


def all_reduce(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    compressor: Compressor,
    algorithm: str = "auto",
    nodes: NodeGroups | None = None,
    chunks: int | None = None,
    async_op: bool = False,
    on_payload: OnPayload | None = None,
) -> Work | None:
    """Sums ``tensor`` over the ranks of ``group``, in place.

    Args:
        tensor: FP32, BF16 or FP16, of any shape and strides; the same shape and dtype on all
            ranks. The sum is made in FP32 and rounded to this dtype once.
        group: The process group.
        compressor: Encodes what is sent.
        algorithm: ``auto``, ``one_shot``, ``two_shot`` or ``hierarchical``: see
            :func:`choose_algorithm`.
        nodes: The sub-groups of ``group`` where it spans nodes, of :class:`Topology`.
        chunks: Parts that travel one after the other, so that encoding and decoding overlap with
            the wire; by default one, or what bounds the memory of a one-shot on many ranks. The
            result is the same, to the bit.
        async_op: Return a handle; the result is in ``tensor`` once its ``wait`` has returned.
            Until then the tensor belongs to the collective.
        on_payload: Sees the payloads that this rank encoded, chunk by chunk.

    Returns:
        The handle if ``async_op``, else None.

    Raises:
        TypeError: The dtype cannot be compressed, or ``group`` is not a group of this rank.
        ValueError: ``algorithm`` is unknown or does not fit, ``chunks`` is below 1, or the tensor
            is sparse.
    """
    size = checks.group_size(group)
    checks.check_tensor("tensor", tensor, size)
    checks.check_chunks(chunks)
    count = 1 if nodes is None else nodes.count
    chosen = choose_algorithm(size, algorithm, nodes=count)
    if size == 1 or tensor.numel() == 0:
        return Work.done() if async_op else None
    with torch.no_grad():
        given = tensor.detach()
        flat = given.contiguous().view(-1)
        one = chosen == "one_shot"
        cuts = plan(
            flat.numel(),
            flat.nbytes,
            unit=compressor.block * (1 if one else size),
            wire_bytes=(size if one else 2) * compressor.payload_bytes(flat.numel()),
            chunks=chunks,
        )
        overlap = async_op or len(cuts.spans) > 1

        def start(part: Tensor) -> Chunk:
            if nodes is not None and chosen == "hierarchical":
                return hierarchical(part, nodes, compressor, on_payload, overlap)
            algorithm = one_shot if one else two_shot
            return algorithm(part, group, compressor, on_payload, overlap)

        parts = (start(flat[first:last]) for first, last in cuts.spans)
        return launch.run(parts, cuts.depth, _write_back(flat, given), flat, async_op)


def _write_back(flat: Tensor, given: Tensor) -> Callable[[], None]:
    """Returns what puts the result where it belongs: nothing, where it is there already."""
    if flat.data_ptr() == given.data_ptr():
        return launch.nothing

    def copy() -> None:
        given.copy_(flat.view(given.shape))

    return copy
