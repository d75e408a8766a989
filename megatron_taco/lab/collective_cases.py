"""The calls that ``bench collectives`` compares: the backend's own and ours, on the same tensors.

BF16, N elements in the whole tensor. All ranks make the same cases in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import (
    NodeGroups,
    all_gather,
    all_reduce,
    reduce_scatter,
    traffic,
)
from megatron_taco.collectives.traffic import Traffic
from megatron_taco.compressors import Compressor, Taco


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective on tensors of its own.

    Attributes:
        prepare: Puts the inputs in place; not timed.
        run: The collective; timed.
        result: Where the result is after it.
    """

    prepare: Callable[[], object]
    run: Callable[[], object]
    result: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plain and a compressed call that do the same.

    Attributes:
        operation: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        size: Bytes of the whole tensor.
        format: The code format.
        rotation: ``hadamard`` or ``none``.
        scales: How scales are sent.
        algorithm: ``one_shot``, ``two_shot`` or ``hierarchical`` for an all-reduce; ``-`` for the
            others.
        traffic: Bytes that each rank sends.
        plain: The backend's call.
        ours: The compressed call.
    """

    operation: str
    size: int
    format: str
    rotation: str
    scales: str
    algorithm: str
    traffic: Traffic
    plain: Call
    ours: Call


def compressors(
    formats: Sequence[str], rotations: Sequence[str], scales: Sequence[str], block: int
) -> list[Taco]:
    """Returns the compressors to compare: all combinations but one kind.

    Beside the rotated formats only the floating-point ones are made without rotation: that is the
    usual alternative, block-scaled FP8.
    """
    found = []
    for form, rotation, kept in itertools.product(formats, rotations, scales):
        if rotation == "none" and "hadamard" in rotations and not form.startswith("e"):
            continue
        found.append(Taco(format=form, block=block, rotation=rotation, scales=kept))
    return found


def cases(
    group: ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int],
    operations: Sequence[str],
    compressors: Sequence[Taco],
    algorithms: Sequence[str],
    nodes: NodeGroups | None,
    chunks: int | None,
) -> Iterator[Case]:
    """Yields the cases, sizes outermost; tensors of a size go when the next size comes.

    Args:
        group: The ranks.
        device: Of the tensors.
        sizes: Bytes of the whole tensor; rounded down to P elements, at least P.
        operations: Which of ``all_reduce``, ``reduce_scatter``, ``all_gather``.
        compressors: What encodes.
        algorithms: For all-reduce.
        nodes: The sub-groups that ``hierarchical`` needs.
        chunks: Of each message; None for the default.
    """
    ranks = group.size()
    generator = torch.Generator(device).manual_seed(1000 + group.rank())
    for size in sizes:
        numel = max(ranks, size // 2 // ranks * ranks)
        whole = torch.randn(numel, generator=generator, device=device, dtype=torch.float32)
        source = whole.to(torch.bfloat16)
        del whole
        for operation in operations:
            plain = _plain(operation, source, group)
            for compressor in compressors:
                for algorithm in algorithms if operation == "all_reduce" else ("-",):
                    yield Case(
                        operation=operation,
                        size=2 * numel,
                        format=compressor.format,
                        rotation=compressor.rotation,
                        scales=compressor.scales,
                        algorithm=algorithm,
                        traffic=traffic(
                            operation,
                            algorithm,
                            numel,
                            2,
                            ranks,
                            compressor.payload_bytes,
                            block=compressor.block,
                            nodes=1 if nodes is None else nodes.count,
                        ),
                        plain=plain,
                        ours=_ours(operation, source, group, compressor, algorithm, nodes, chunks),
                    )


def _tensors(operation: str, source: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The input, which the call may overwrite, and the output."""
    ranks, numel = group.size(), source.numel()
    if operation == "all_reduce":
        both = torch.empty_like(source)
        return both, both
    if operation == "reduce_scatter":
        return torch.empty_like(source), source.new_empty(numel // ranks)
    return source.new_empty(numel // ranks), torch.empty_like(source)


def _call(
    operation: str, source: Tensor, group: ProcessGroup, run: Callable[[Tensor, Tensor], object]
) -> Call:
    given, result = _tensors(operation, source, group)
    return Call(
        prepare=lambda: given.copy_(source[: given.numel()]),
        run=lambda: run(result, given),
        result=result,
    )


def _plain(operation: str, source: Tensor, group: ProcessGroup) -> Call:
    runs: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all_reduce": lambda _, given: dist.all_reduce(given, group=group),
        "reduce_scatter": lambda out, given: dist.reduce_scatter_tensor(out, given, group=group),
        "all_gather": lambda out, given: dist.all_gather_into_tensor(out, given, group=group),
    }
    return _call(operation, source, group, runs[operation])


def _ours(
    operation: str,
    source: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    algorithm: str,
    nodes: NodeGroups | None,
    chunks: int | None,
) -> Call:
    common: dict[str, Any] = {"group": group, "compressor": compressor, "chunks": chunks}
    runs: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all_reduce": lambda _, given: all_reduce(
            given, algorithm=algorithm, nodes=nodes, **common
        ),
        "reduce_scatter": lambda out, given: reduce_scatter(out, given, **common),
        "all_gather": lambda out, given: all_gather(out, given, **common),
    }
    return _call(operation, source, group, runs[operation])
