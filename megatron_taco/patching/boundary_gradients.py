"""The projectors' gradients of a step, whole and the same at both ends of each boundary.

A projector lives outside Megatron's gradient buffers, so what is done to those is done here:

1. sum over the tensor-parallel ranks, under sequence parallelism alone (elsewhere they are copies);
2. sum over data x context parallel ranks, and 1 / their number unless losses are per token;
3. both ends of a cut boundary exchange their parts, at the same moment in both directions;
4. sender's part + receiver's part, in this order at both ends;
5. 1 / number of tokens, where losses are per token.

A micro-batch's share of the loss is in the gradients already; nothing is divided twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Boundary
from megatron_taco.boundaries.subspace import Subspace
from megatron_taco.collectives.ordered import ordered_all_reduce_
from megatron_taco.telemetry.counters import Counters, Flow

EXCHANGE = Flow("pp.projector", "exchange")
"""Between the ends of a boundary."""

PROJECTOR_SUM = Flow("pp.projector", "all_reduce")
"""Over replicas, where there are several; so is the next."""

CODEBOOK_SUM = Flow("pp.codebook", "all_reduce")


@dataclass(frozen=True)
class Groups:
    """Where a boundary's gradients have their parts.

    Attributes:
        replicas: groups to sum over, in order: data x context parallel, and tensor parallel under
            sequence parallelism.
        scale: what the sum is multiplied by.
        pipeline: the pipeline's group.
    """

    replicas: tuple[dist.ProcessGroup, ...]
    scale: float
    pipeline: dist.ProcessGroup

    @property
    def replica(self) -> tuple[int, int]:
        """Number of this process among those that see other tokens, and how many there are."""
        number, count = 0, 1
        for group in self.replicas:
            number = number * group.size() + group.rank()
            count *= group.size()
        return number, count

    def neighbour(self, boundary: Boundary) -> int:
        """Global rank of the other end of a cut boundary."""
        step = 1 if boundary.place.ends == "sender" else -1
        return dist.get_global_rank(
            self.pipeline, (self.pipeline.rank() + step) % self.pipeline.size()
        )


def whole_gradients(
    boundaries: Mapping[int, Boundary], groups: Groups, tokens: Tensor | None, counters: Counters
) -> dict[int, Tensor]:
    """Reduce, exchange and add; every rank of the model calls it once the backward passes are done.

    Args:
        boundaries: of this process, by number.
        groups: see :class:`Groups`.
        tokens: tokens of the global batch, 0-dim or [1], where losses are per token.
        counters: count the sums and the exchange.

    Returns:
        FP32 [d, r] for each boundary with a learned projector.
    """
    parts = {number: each.gradient_parts() for number, each in boundaries.items()}
    parts = {number: part for number, part in parts.items() if part}
    for number in sorted(parts):
        for part in parts[number].values():
            _sum(part, groups, counters, PROJECTOR_SUM)
            part.mul_(groups.scale)
    theirs = _exchange({n: boundaries[n] for n in parts}, parts, groups, counters)
    whole = {}
    for number, ours in sorted(parts.items()):
        both = {**ours, **theirs.get(number, {})}
        total = both["sender"] + both["receiver"]
        if tokens is not None:
            total /= tokens.clamp(min=1)
        whole[number] = total
    return whole


def _exchange(
    boundaries: Mapping[int, Boundary],
    parts: Mapping[int, Mapping[str, Tensor]],
    groups: Groups,
    counters: Counters,
) -> dict[int, dict[str, Tensor]]:
    """Swap the parts with the other ends: one message for each neighbour in each direction."""
    by_neighbour: dict[int, list[int]] = {}
    for number, boundary in sorted(boundaries.items()):
        if boundary.place.ends != "both":
            by_neighbour.setdefault(groups.neighbour(boundary), []).append(number)
    operations, arriving = [], []
    for rank, numbers in by_neighbour.items():
        ours = torch.cat([part.view(-1) for n in numbers for part in parts[n].values()])
        theirs = torch.empty_like(ours)
        operations.append(dist.P2POp(dist.isend, ours, rank, groups.pipeline))
        operations.append(dist.P2POp(dist.irecv, theirs, rank, groups.pipeline))
        arriving.append((numbers, theirs))
        _count(counters, EXCHANGE, ours.numel() * ours.element_size())
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    found: dict[int, dict[str, Tensor]] = {}
    for numbers, theirs in arriving:
        sizes = [part.numel() for n in numbers for part in parts[n].values()]
        for number, flat in zip(numbers, theirs.split(sizes), strict=True):
            ((end, part),) = parts[number].items()
            other = "receiver" if end == "sender" else "sender"
            found[number] = {other: flat.view_as(part)}
    return found


def _sum(tensor: Tensor, groups: Groups, counters: Counters, flow: Flow) -> None:
    """Sum over the replicas in place, and count it."""
    for group in groups.replicas:
        ordered_all_reduce_(tensor, group)
        if group.size() > 1:
            _count(counters, flow, _ring_bytes(tensor, group.size()))


def _ring_bytes(tensor: Tensor, ranks: int) -> int:
    """What an ``ordered_all_reduce_`` sends from each rank, as a ring would."""
    return 2 * (ranks - 1) * -(-tensor.numel() // ranks) * tensor.element_size()


def _count(counters: Counters, flow: Flow, sent: int) -> None:
    """Count a message that goes as it is, of ``sent`` bytes."""
    count = counters[flow]
    count.seen += 1
    count.raw += sent
    count.wire += sent
    count.largest = max(count.largest, sent)


def summed_pulls(
    boundaries: Mapping[int, Boundary], groups: Groups, counters: Counters
) -> dict[int, Tensor]:
    """What moves the subspace of a Subspace Network, in steps that end with a move.

    Args:
        boundaries: of this process, by number; none or all of the model's are due.
        groups: see :class:`Groups`.
        counters: count the sums over replicas and over stages.

    Returns:
        For each boundary the sum over all boundaries and replicas, FP32 [d, k].
    """
    due = {n: b for n, b in sorted(boundaries.items()) if isinstance(b, Subspace) and b.due}
    if not due:
        return {}
    a = next(iter(due.values())).projector.a
    total = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
    for boundary in due.values():
        if boundary.pull is not None:
            total += boundary.pull
    _sum(total, groups, counters, PROJECTOR_SUM)
    ordered_all_reduce_(total, groups.pipeline)
    stages = groups.pipeline.size()
    if stages > 1:
        _count(counters, EXCHANGE, _ring_bytes(total, stages))
    return {number: total.clone() for number in due}


def summed_statistics(
    boundaries: Mapping[int, Boundary], groups: Groups, counters: Counters
) -> dict[int, Tensor]:
    """What codebooks need at the end of the step, summed over the replicas.

    Args:
        boundaries: of this process, by number.
        groups: see :class:`Groups`.
        counters: count the sums.
    """
    found = {}
    for number, boundary in sorted(boundaries.items()):
        statistics = boundary.statistics(*groups.replica)
        if statistics is not None:
            _sum(statistics, groups, counters, CODEBOOK_SUM)
            found[number] = statistics
    return found
