"""Reduce-scatter of a bucket in two hops: inside each node, then between nodes (SDP4Bit).

The links inside a node are fast, those between nodes slow, and a sum of a node's ranks is one
message where its ranks would send as many each. So (arXiv 2410.15526, TLq): rank l of node k

    1. gets from each rank of its node the slices that the ranks l of all nodes will own, encoded
       finely (8 bits), decodes and adds them in FP32, and encodes the K sums coarsely (4 bits);
    2. exchanges these with the ranks l of the other nodes, decodes and adds them.

Two lossy steps; (K - 1) / P of the bucket crosses between nodes for each rank, instead of
(K - 1) L / P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import buckets
from megatron_taco.collectives.buckets import Codec, OnPart
from megatron_taco.collectives.segments import Slice
from megatron_taco.collectives.work import Work


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node, and the groups of both hops.

    Attributes:
        ranks: Group ranks, ``ranks[k][l]`` on node k; as many on each node.
        inner: The group of this rank's node, in the order of ``ranks[k]``.
        outer: The group of the ranks at this rank's place on all nodes, in node order.
    """

    ranks: tuple[tuple[int, ...], ...]
    inner: ProcessGroup
    outer: ProcessGroup

    @property
    def column(self) -> tuple[int, ...]:
        """Group ranks at this rank's place, node by node."""
        place = self.inner.rank()
        return tuple(node[place] for node in self.ranks)


def nodes_of(ranks: Sequence[int], ranks_per_node: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the positions in ``ranks`` by node, or None where two hops have no use.

    Args:
        ranks: Global ranks of a group.
        ranks_per_node: Global ranks of a node; node k has ranks k n to (k + 1) n - 1.

    Returns:
        None if all are on one node, none share one, or nodes have different numbers of them.
    """
    found: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        found.setdefault(rank // ranks_per_node, []).append(position)
    nodes = tuple(tuple(found[node]) for node in sorted(found))
    sizes = {len(node) for node in nodes}
    if len(nodes) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    return nodes


def reduce_scatter(
    output: Tensor,
    bucket: Tensor,
    *,
    nodes: Nodes,
    fine: tuple[Slice, ...],
    coarse: tuple[Slice, ...],
    fine_codec: Codec,
    coarse_codec: Codec,
    average: bool,
    on_fine: OnPart,
    on_coarse: OnPart,
) -> Work:
    """Sums ``bucket`` over all ranks and leaves slice r of it on rank r.

    Args:
        output: Gets this rank's slice; may be a view of ``bucket``.
        bucket: FP32, BF16 or FP16 [N].
        nodes: The ranks of the group, of P in all, and the groups of the hops.
        fine: One slice a rank, laid out for the hop inside a node.
        coarse: The same slices, laid out for the hop between nodes, exact parts as FP32 sums.
        fine_codec: Compressors of the first hop.
        coarse_codec: Compressors of the second.
        average: Divide the FP32 sum by P.
        on_fine: Sees this rank's payloads of the first hop.
        on_coarse: Sees those of the second.

    Returns:
        The handle; the second hop happens in its ``wait``.
    """
    order = [node[place] for place in range(len(nodes.ranks[0])) for node in nodes.ranks]
    per_rank = len(nodes.ranks)
    with torch.no_grad():
        numbered = [(index, fine[index]) for index in order]
        sent = buckets.encode_slices(bucket, numbered, fine_codec, on_fine)
        sizes = [piece.size for _, piece in numbered]
        splits = [sum(sizes[at : at + per_rank]) for at in range(0, len(sizes), per_rank)]
        mine = splits[nodes.inner.rank()]
        received = sent.new_empty(nodes.inner.size() * mine)
        handle = dist.all_to_all_single(
            received, sent, [mine] * nodes.inner.size(), splits, group=nodes.inner, async_op=True
        )

    def finish() -> None:
        own = nodes.column[nodes.outer.rank()]
        node_rows = received.view(nodes.inner.size(), mine)
        message = node_rows.new_zeros(sum(coarse[index].size for index in nodes.column))
        come_from = gone_to = 0
        for index in nodes.column:
            rows = node_rows[:, come_from : come_from + fine[index].size]
            target = message[gone_to : gone_to + coarse[index].size]
            summed = buckets.sums(rows, fine[index], fine_codec, bucket.dtype, None)
            for part, (_, total) in zip(coarse[index].parts, summed, strict=True):
                compressor = coarse_codec(buckets.REDUCE, index, part.kind)
                buckets.write_part(part, total, target, compressor, on_coarse)
            come_from += fine[index].size
            gone_to += coarse[index].size
        size = coarse[own].size
        answers = message.new_empty(nodes.outer.size() * size)
        dist.all_to_all_single(
            answers,
            message,
            [size] * nodes.outer.size(),
            [coarse[index].size for index in nodes.column],
            group=nodes.outer,
        )
        rows = answers.view(nodes.outer.size(), size)
        divisor = sum(map(len, nodes.ranks)) if average else None
        for part, total in buckets.sums(rows, coarse[own], coarse_codec, torch.float32, divisor):
            part.shifted(coarse[own].start).put(total, output)

    return Work(handle, finish, sent, received)
