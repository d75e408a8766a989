"""How the compressed collectives are called: async, strides, views, sub-groups, bytes, errors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_taco.collectives import (
    Work,
    all_gather,
    all_reduce,
    choose_algorithm,
    reduce_scatter,
    traffic,
)
from megatron_taco.compressors import Taco
from tests.distributed import oracle
from tests.distributed.sent import counted
from tests.ranks import RankRunner

ALGORITHMS = ("one_shot", "two_shot")


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _async(rank: int, size: int) -> None:
    group, taco = _world(), Taco(block=64)
    xs = oracle.inputs(size, 60 * size + 7 * size, torch.bfloat16)
    for algorithm in ALGORITHMS:
        expected = xs[rank].clone()
        all_reduce(expected, group=group, compressor=taco, algorithm=algorithm)
        a, b = xs[rank].clone(), xs[rank].clone()
        works = []
        for x in (a, b):
            work = all_reduce(x, group=group, compressor=taco, algorithm=algorithm, async_op=True)
            assert isinstance(work, Work)
            assert not work.is_completed()
            assert torch.equal(x, xs[rank])  # nothing is written before wait
            works.append(work)
        for work in reversed(works):  # any order, as long as it is the same on all ranks
            assert work.wait() is True
            assert work.is_completed()
        assert oracle.same_bits(a, expected)
        assert oracle.same_bits(b, expected)
        a.zero_()
        assert works[0].wait() is True  # again: nothing happens
        assert not bool(a.any())

    part = xs[rank].chunk(size)[rank].clone()
    sync = torch.empty_like(part)
    reduce_scatter(sync, xs[rank], group=group, compressor=taco)
    later = torch.empty_like(part)
    source = xs[rank].clone()
    work = reduce_scatter(later, source, group=group, compressor=taco, async_op=True)
    source.fill_(99)  # it is encoded already
    assert work is not None
    work.wait()
    assert oracle.same_bits(sync, later)

    sync = torch.empty_like(xs[rank])
    all_gather(sync, part, group=group, compressor=taco)
    later = torch.empty_like(sync)
    work = all_gather(later, part, group=group, compressor=taco, async_op=True)
    part.fill_(99)
    assert work is not None
    work.wait()
    assert oracle.same_bits(sync, later)

    nothing = all_reduce(torch.empty(0), group=group, compressor=taco, async_op=True)
    assert isinstance(nothing, Work)
    assert nothing.is_completed()
    assert nothing.wait() is True


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_async_is_sync(run_ranks: RankRunner, world_size: int) -> None:
    """Same bits, complete only after wait, which may be called twice."""
    run_ranks(_async, world_size)


def _strides(rank: int, size: int) -> None:
    group, taco = _world(), Taco(block=64)
    base = oracle.inputs(size, 40 * 30, torch.float32)[rank].view(40, 30)
    for algorithm in ALGORITHMS:
        plain = base.t().contiguous()
        all_reduce(plain, group=group, compressor=taco, algorithm=algorithm)
        storage = base.clone()
        view = storage.t()
        all_reduce(view, group=group, compressor=taco, algorithm=algorithm)
        assert torch.equal(storage.t(), plain)  # written to the very memory

        wide = torch.zeros(40, 60)
        wide[:, ::2] = base
        all_reduce(wide[:, ::2], group=group, compressor=taco, algorithm=algorithm)
        again = base.clone()
        all_reduce(again, group=group, compressor=taco, algorithm=algorithm)
        assert torch.equal(wide[:, ::2], again)
        assert not bool(wide[:, 1::2].any())

        leaf = base.clone().requires_grad_()
        all_reduce(leaf, group=group, compressor=taco, algorithm=algorithm)
        assert torch.equal(leaf.detach(), again)
        assert leaf.requires_grad
        assert leaf.is_leaf

    # As in a gradient buffer: the output of a reduce-scatter is a view of its input, and the
    # input of an all-gather one of its output.
    whole = oracle.inputs(size, 50 * size, torch.float32, seed=3)[rank]
    mine = torch.empty(50)
    reduce_scatter(mine, whole, group=group, compressor=taco)
    buffer = whole.clone()
    view = buffer.chunk(size)[rank]
    reduce_scatter(view, buffer, group=group, compressor=taco)
    assert torch.equal(view, mine)
    everything = torch.empty(50 * size)
    all_gather(everything, mine, group=group, compressor=taco)
    all_gather(buffer, view, group=group, compressor=taco)
    assert torch.equal(buffer, everything)

    # Shapes differ, elements fit; a transposed input and output.
    square = torch.empty(30 * size, 40).t()
    flat = torch.empty(30 * size * 40)
    all_gather(square, base.t(), group=group, compressor=taco)
    all_gather(flat, base.t().contiguous(), group=group, compressor=taco)
    assert torch.equal(square.reshape(-1), flat)


def test_strides_views_and_leaves(run_ranks: RankRunner) -> None:
    """The result lands in the given tensor, whatever its strides, and nowhere else."""
    run_ranks(_strides, 3)


def _groups(rank: int, size: int) -> tuple[str, str]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    strided = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    taco = Taco(block=64)
    xs = oracle.inputs(size, 1000, torch.float32)
    found = []
    for groups, ranks in (
        (pairs, [0, 1] if rank < 2 else [2, 3]),
        (strided, [rank % 2, rank % 2 + 2]),
    ):
        group = groups[rank // 2 if groups is pairs else rank % 2]
        assert isinstance(group, ProcessGroup)
        members = [xs[r] for r in ranks]
        for algorithm in ALGORITHMS:
            x = xs[rank].clone()
            all_reduce(x, group=group, compressor=taco, algorithm=algorithm)
            expected = {"one_shot": oracle.one_shot, "two_shot": oracle.two_shot}[algorithm]
            assert oracle.same_bits(x, expected(members, taco))
        part = torch.empty(500)
        reduce_scatter(part, xs[rank], group=group, compressor=taco)
        position = ranks.index(rank)
        assert oracle.same_bits(part, oracle.reduce_scatter(members, position, taco))
        whole = torch.empty(2000)
        all_gather(whole, xs[rank], group=group, compressor=taco)
        assert oracle.same_bits(whole, oracle.all_gather(members, taco))
        found.append(oracle.digest(whole))

        other = groups[1 - groups.index(group)]
        with pytest.raises(TypeError, match="this rank is a member of"):
            all_reduce(xs[rank].clone(), group=other, compressor=taco)

    alone = [dist.new_group([r]) for r in range(size)][rank]
    x = xs[rank].clone()
    all_reduce(x, group=alone, compressor=taco)
    assert torch.equal(x, xs[rank])  # nothing is sent, so nothing is lost
    y = torch.empty_like(x)
    reduce_scatter(y, x, group=alone, compressor=taco)
    assert torch.equal(y, x)
    y = torch.empty_like(x)
    work = all_gather(y, x, group=alone, compressor=taco, async_op=True)
    assert work is not None
    assert work.wait()
    assert torch.equal(y, x)
    return found[0], found[1]


def test_sub_groups(run_ranks: RankRunner) -> None:
    """Two groups of two in a world of four, both ways to cut it, and groups of one."""
    results = run_ranks(_groups, 4)
    assert results[0][0] == results[1][0] != results[2][0] == results[3][0]
    assert results[0][1] == results[2][1] != results[1][1] == results[3][1]


def _count_bytes(rank: int, size: int) -> int:
    """Compares traffic() with the bytes that torch.distributed is given to send to others."""
    group = _world()
    checked = 0
    with counted() as sent:
        for taco in (Taco(block=64), Taco(format="int6", block=128, scales="merged_bf16")):
            for numel in (0, 1, 63, 64, 65, 64 * size, 4099):
                for op in ("one_shot", "two_shot", "reduce_scatter", "all_gather"):
                    sent.clear()
                    mine = torch.randn(numel, dtype=torch.bfloat16)
                    all_of_it = torch.randn(size * numel, dtype=torch.bfloat16)
                    total = size * numel
                    if op == "reduce_scatter":
                        reduce_scatter(mine, all_of_it, group=group, compressor=taco)
                    elif op == "all_gather":
                        all_gather(all_of_it, mine, group=group, compressor=taco)
                    else:
                        all_reduce(mine, group=group, compressor=taco, algorithm=op)
                        total = numel
                    name = "all_reduce" if op in ALGORITHMS else op
                    expected = traffic(
                        name, op, total, 2, size, taco.payload_bytes, block=taco.block
                    )
                    assert sent[group] == expected.wire, f"{op} of {numel} by {taco}"
                    checked += 1
    return checked


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_traffic_is_what_is_sent(run_ranks: RankRunner, world_size: int) -> None:
    """Every byte is counted, all of it is uint8, and there are no other messages."""
    assert run_ranks(_count_bytes, world_size) == [2 * 7 * 4] * world_size


def _refusals(rank: int, size: int) -> None:
    group, taco = _world(), Taco()
    if rank == 0:  # alone: had it sent anything, the barrier below would not match
        for dtype in (torch.float64, torch.int64, torch.bool, torch.uint8):
            with pytest.raises(TypeError, match=r"tensor \w+\[4, 6\] in a group of 2: only"):
                all_reduce(torch.zeros(4, 6, dtype=dtype), group=group, compressor=taco)
        with pytest.raises(ValueError, match="algorithm: got 'ring', allowed"):
            all_reduce(torch.zeros(4), group=group, compressor=taco, algorithm="ring")
        with pytest.raises(ValueError, match="dense"):
            all_reduce(torch.eye(3).to_sparse(), group=group, compressor=taco)
        no_group: Any = None
        with pytest.raises(TypeError, match="got None, expected a ProcessGroup"):
            all_reduce(torch.zeros(4), group=no_group, compressor=taco)
        for call in (reduce_scatter, all_gather):
            few, many = torch.zeros(3), torch.zeros(7)
            pair = (few, many) if call is reduce_scatter else (many, few)
            with pytest.raises(ValueError, match=r"float32\[3\].*must have 2 times.* 7 against 3"):
                call(*pair, group=group, compressor=taco)
            with pytest.raises(TypeError, match="dtypes must be the same"):
                call(torch.zeros(4), torch.zeros(4).half(), group=group, compressor=taco)
            with pytest.raises(TypeError, match=r"input int32\[4\] in a group of 2"):
                call(torch.zeros(4), torch.zeros(4).int(), group=group, compressor=taco)
            with pytest.raises(ValueError, match=r"on (meta and cpu|cpu and meta), must be"):
                call(torch.zeros(4), torch.zeros(4).to("meta"), group=group, compressor=taco)
    dist.barrier()
    x = torch.ones(8)
    with dist.distributed_c10d._coalescing_manager(group):
        for call in (reduce_scatter, all_gather):
            with pytest.raises(RuntimeError, match="_coalescing_manager"):
                call(x, x, group=group, compressor=taco)
        with pytest.raises(RuntimeError, match="_coalescing_manager"):
            all_reduce(x, group=group, compressor=taco)
    all_reduce(x, group=group, compressor=taco)  # and the group is as good as before
    assert torch.allclose(x, torch.full((8,), 2.0), rtol=0.05)


def test_errors_come_before_any_message(run_ranks: RankRunner) -> None:
    """What cannot be compressed is refused by the one rank that tries, with what it was."""
    run_ranks(_refusals, 2)


def test_choose_algorithm() -> None:
    """Auto is one-shot for two ranks, where it sends no more, and two-shot above."""
    assert [choose_algorithm(p, "auto") for p in (1, 2, 3, 4, 8)] == [
        "one_shot",
        "one_shot",
        "two_shot",
        "two_shot",
        "two_shot",
    ]
    for algorithm in ALGORITHMS:
        assert [choose_algorithm(p, algorithm) for p in (1, 2, 4)] == [algorithm] * 3
    with pytest.raises(ValueError, match="hierarchical"):
        choose_algorithm(4, "hierarchical")
