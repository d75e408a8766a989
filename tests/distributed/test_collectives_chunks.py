"""Chunks: the bits and bytes of the whole message, in the order that overlaps; P = 3 and 8."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.collectives import all_gather, all_reduce, reduce_scatter, traffic
from megatron_taco.compressors import Taco
from tests.distributed import oracle
from tests.ranks import RankRunner

BLOCK = 64
ORACLES = {"one_shot": oracle.one_shot, "two_shot": oracle.two_shot}


def _everything(rank: int, size: int, sizes: list[int]) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    taco = Taco(block=BLOCK)
    shared = []
    for numel in sizes:
        for chunks in (1, 2, 5, 1000):
            for async_op in (False, True):
                payloads: list[tuple[Tensor, int]] = []
                options: dict[str, Any] = {
                    "group": group,
                    "compressor": taco,
                    "chunks": chunks,
                    "async_op": async_op,
                    "on_payload": lambda p, n, kept=payloads: kept.append((p.clone(), n)),
                }
                what = f"{numel} in {chunks} chunks, async {async_op}"
                xs = oracle.inputs(size, numel, torch.bfloat16, seed=numel)
                for algorithm, wanted in ORACLES.items():
                    x = xs[rank].clone()
                    work = all_reduce(x, algorithm=algorithm, **options)
                    if work is not None:
                        work.wait()
                    assert oracle.same_bits(x, wanted(xs, taco)), f"{algorithm} {what}"
                    shared.append(oracle.digest(x))
                    sent = sum(p.nbytes for p, _ in payloads)
                    rows = (size - 1) if algorithm == "one_shot" else 2 * (size - 1) / size
                    expected = traffic(
                        "all_reduce", algorithm, numel, 2, size, taco.payload_bytes, block=BLOCK
                    )
                    assert sent * rows == expected.wire
                    units = -(-numel // (BLOCK * (1 if algorithm == "one_shot" else size)))
                    assert len(payloads) == min(chunks, units)
                    payloads.clear()
                gathered = torch.full((size * numel,), 7.0, dtype=torch.bfloat16)
                work = all_gather(gathered, xs[rank], **options)
                if work is not None:
                    work.wait()
                assert oracle.same_bits(gathered, oracle.all_gather(xs, taco)), what
                shared.append(oracle.digest(gathered))

                wholes = oracle.inputs(size, size * numel, torch.bfloat16, seed=numel + 1)
                buffer = wholes[rank].clone()
                scattered = buffer.chunk(size)[rank]  # a view, as in a gradient buffer
                work = reduce_scatter(scattered, buffer, **options)
                if work is not None:
                    work.wait()
                expected_part = oracle.reduce_scatter(wholes, rank, taco)
                assert oracle.same_bits(scattered, expected_part), what
    return shared


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(2, [1, 2 * BLOCK, 2001]), (3, [65, 2001]), (8, [2001])]
)
def test_any_number_of_chunks(run_ranks: RankRunner, world_size: int, sizes: list[int]) -> None:
    """The oracle's bits and the bytes of traffic(), with more chunks than blocks as well."""
    results = run_ranks(_everything, world_size, sizes)
    assert all(shared == results[0] for shared in results)


def _order(rank: int, size: int) -> list[str]:
    """Returns the order in which three chunks of a two-shot are launched and waited for."""
    group = dist.group.WORLD
    assert group is not None
    log: list[str] = []
    count = {"exchange": 0, "gather": 0}

    class Logged:
        def __init__(self, name: str, handle: Any) -> None:
            self.name, self.handle = name, handle

        def wait(self, *args: Any) -> None:
            log.append(f"wait {self.name}")
            self.handle.wait(*args)

    def logged(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            assert kwargs["async_op"] is True
            this = f"{name} {count[name]}"
            count[name] += 1
            log.append(this)
            return Logged(this, call(*args, **kwargs))

        return run

    with (
        mock.patch.object(dist, "all_to_all_single", logged("exchange", dist.all_to_all_single)),
        mock.patch.object(
            dist, "all_gather_into_tensor", logged("gather", dist.all_gather_into_tensor)
        ),
    ):
        all_reduce(
            torch.ones(6 * BLOCK * size),
            group=group,
            compressor=Taco(block=BLOCK),
            algorithm="two_shot",
            chunks=3,
            on_payload=lambda payloads, numel: log.append("encode"),
        )
    return log


def test_launch_order(run_ranks: RankRunner) -> None:
    """Every message is under way before the first is waited for, then each follows its own."""
    expected = []
    for i in range(3):
        expected += ["encode", f"exchange {i}"]
    for i in range(3):
        expected += [f"wait exchange {i}", f"gather {i}"]
    expected += [f"wait gather {i}" for i in range(3)]
    assert run_ranks(_order, 3) == [expected] * 3


def _bounded(rank: int, size: int) -> tuple[int, int]:
    """Returns the chunks of a one-shot of 2 MiB, and the most that were under way."""
    group = dist.group.WORLD
    assert group is not None
    now, most, total = 0, 0, 0
    gather = dist.all_gather_into_tensor

    class Counted:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def wait(self) -> None:
            nonlocal now
            now -= 1
            self.handle.wait()

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal now, most, total
        now, total = now + 1, total + 1
        most = max(most, now)
        return Counted(gather(*args, **kwargs))

    xs = oracle.inputs(size, 1 << 20, torch.bfloat16)
    x = xs[rank].clone()
    with mock.patch.object(dist, "all_gather_into_tensor", counted):
        all_reduce(x, group=group, compressor=Taco(), algorithm="one_shot")
    assert torch.equal(x, oracle.one_shot(xs, Taco()))
    return total, most


def test_memory_of_a_one_shot_on_many_ranks_is_bounded(run_ranks: RankRunner) -> None:
    """Eight payloads are four times the tensor: only half of the chunks travel at a time."""
    assert run_ranks(_bounded, 8) == [(4, 2)] * 8
