"""The calls that ``bench collectives`` compares: the backend's own and ours, on the same tensors.

BF16, N elements in the whole tensor. All ranks make the same cases in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import all_gather, all_reduce, reduce_scatter, traffic
from megatron_taco.collectives.traffic import Traffic
from megatron_taco.compressors import Compressor, build


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
        algorithm: ``one_shot`` or ``two_shot`` for an all-reduce; ``-`` for the others.
        traffic: Bytes that each rank sends.
        plain: The backend's call.
        ours: The compressed call.
    """

    operation: str
    size: int
    format: str
    algorithm: str
    traffic: Traffic
    plain: Call
    ours: Call


def cases(
    group: ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int],
    operations: Sequence[str],
    formats: Sequence[str],
    algorithms: Sequence[str],
    block: int,
    scales: str,
) -> Iterator[Case]:
    """Yields the cases, sizes outermost; tensors of a size go when the next size comes.

    Args:
        group: The ranks.
        device: Of the tensors.
        sizes: Bytes of the whole tensor; rounded down to P elements, at least P.
        operations: Which of ``all_reduce``, ``reduce_scatter``, ``all_gather``.
        formats: Code formats.
        algorithms: For all-reduce.
        block: Elements that share a scale.
        scales: How scales are sent.
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
            for name in formats:
                compressor = build("taco", format=name, block=block, scales=scales)
                for algorithm in algorithms if operation == "all_reduce" else ("-",):
                    yield Case(
                        operation=operation,
                        size=2 * numel,
                        format=name,
                        algorithm=algorithm,
                        traffic=traffic(
                            operation,
                            algorithm,
                            numel,
                            2,
                            ranks,
                            compressor.payload_bytes,
                            block=block,
                        ),
                        plain=plain,
                        ours=_ours(operation, source, group, compressor, algorithm),
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
    operation: str, source: Tensor, group: ProcessGroup, compressor: Compressor, algorithm: str
) -> Call:
    runs: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all_reduce": lambda _, given: all_reduce(
            given, group=group, compressor=compressor, algorithm=algorithm
        ),
        "reduce_scatter": lambda out, given: reduce_scatter(
            out, given, group=group, compressor=compressor
        ),
        "all_gather": lambda out, given: all_gather(out, given, group=group, compressor=compressor),
    }
    return _call(operation, source, group, runs[operation])
