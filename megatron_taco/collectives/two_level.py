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

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import buckets
from megatron_taco.collectives.buckets import Codec, OnPart
from megatron_taco.collectives.nodes import NodeGroups, Topology
from megatron_taco.collectives.pipeline import Chunk
from megatron_taco.collectives.segments import Slice
from megatron_taco.collectives.work import Work


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node, and the groups of both hops.

    Attributes:
        ranks: Group ranks, ``ranks[k][l]`` on node k; as many on each node.
        groups: The groups of this rank's node, in the order of ``ranks[k]``, and of the ranks at
            its place on all nodes, in node order.
    """

    ranks: tuple[tuple[int, ...], ...]
    groups: NodeGroups

    @property
    def column(self) -> tuple[int, ...]:
        """Group ranks at this rank's place, node by node."""
        place = self.groups.local.rank()
        return tuple(node[place] for node in self.ranks)


def nodes_of(group: ProcessGroup, topology: Topology) -> Nodes | None:
    """Returns how a group lies on nodes, or None where two hops have no use.

    All ranks of the group make the first call for it, and make no other call on it meanwhile.

    Args:
        group: A group of this rank.
        topology: Knows this rank's node.
    """
    groups = topology.of(group)
    if groups is None:
        return None
    mine = dist.get_process_group_ranks(groups.across)
    columns: list[list[int]] = [[]] * groups.local.size()
    dist.all_gather_object(columns, mine, group=groups.local)
    place = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(group))}
    ranks = tuple(tuple(place[rank] for rank in node) for node in zip(*columns, strict=True))
    return Nodes(ranks, groups)


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
    local, across = nodes.groups.local, nodes.groups.across

    def chunk() -> Chunk:
        order = [node[place] for place in range(local.size()) for node in nodes.ranks]
        numbered = [(index, fine[index]) for index in order]
        sent = buckets.encode_slices(bucket, numbered, fine_codec, on_fine)
        splits = [
            sum(fine[index].size for index in column) for column in zip(*nodes.ranks, strict=True)
        ]
        received = sent.new_empty(local.size(), splits[local.rank()])
        yield dist.all_to_all_single(
            received.view(-1),
            sent,
            [received.shape[1]] * local.size(),
            splits,
            group=local,
            async_op=True,
        )
        message = sent.new_zeros(sum(coarse[index].size for index in nodes.column))
        come_from = gone_to = 0
        for index in nodes.column:
            rows = received[:, come_from : come_from + fine[index].size]
            target = message[gone_to : gone_to + coarse[index].size]
            summed = buckets.sums(rows, fine[index], fine_codec, bucket.dtype, None)
            for part, (_, total) in zip(coarse[index].parts, summed, strict=True):
                compressor = coarse_codec(buckets.REDUCE, index, part.kind)
                buckets.write_part(part, total, target, compressor, on_coarse)
            come_from += fine[index].size
            gone_to += coarse[index].size
        own = nodes.column[across.rank()]
        answers = message.new_empty(across.size(), coarse[own].size)
        yield dist.all_to_all_single(
            answers.view(-1),
            message,
            [coarse[own].size] * across.size(),
            [coarse[index].size for index in nodes.column],
            group=across,
            async_op=True,
        )
        divisor = local.size() * across.size() if average else None
        for part, total in buckets.sums(answers, coarse[own], coarse_codec, torch.float32, divisor):
            part.shifted(coarse[own].start).put(total, output)

    return buckets.start(chunk(), bucket)
