"""Special values through the compressed collectives: NaN, Inf, zeros, outliers; determinism."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.collectives import all_gather, all_reduce, reduce_scatter
from megatron_taco.compressors import Taco
from tests.distributed import oracle
from tests.ranks import RankRunner

BLOCK = 64
BLOCKS = 12  # a multiple of every world size here, so that slices begin at blocks
NUMEL = BLOCK * BLOCKS
MODES = ("one_shot", "two_shot", "reduce_scatter", "all_gather")


def _whole(mode: str, xs: list[Tensor], rank: int, compressor: Taco) -> Tensor:
    """Runs a collective and returns the whole result, gathered exactly where it is scattered.

    For the all-gather the inputs are the ranks' slices of ``xs``, for the others all of it.
    """
    group = dist.group.WORLD
    assert group is not None
    size = len(xs)
    if mode in ("one_shot", "two_shot"):
        out = xs[rank].clone()
        all_reduce(out, group=group, compressor=compressor, algorithm=mode)
        return out
    out = torch.empty_like(xs[rank])
    if mode == "all_gather":
        mine = xs[rank].chunk(size)[rank].clone()
        all_gather(out, mine, group=group, compressor=compressor)
        return out
    part = out.new_empty(out.numel() // size)
    reduce_scatter(part, xs[rank], group=group, compressor=compressor)
    # NaN survives the exact gather, as these are bytes.
    dist.all_gather_into_tensor(out.view(torch.uint8), part.view(torch.uint8), group=group)
    return out


def _each(rank: int, size: int, check: Callable[[str, list[Tensor], int, Taco], None]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scales in ("dual", "merged_fp32", "merged_bf16"):
            for mode in MODES:
                check(
                    mode,
                    oracle.inputs(size, NUMEL, dtype, seed=9),
                    rank,
                    Taco(block=BLOCK, scales=scales),
                )


def _block(x: Tensor, index: int) -> Tensor:
    return x[index * BLOCK : (index + 1) * BLOCK]


def _owner(mode: str, size: int, block: int, otherwise: int) -> int:
    """The rank whose input holds a block of the result: of an all-gather there is just one."""
    return block // (BLOCKS // size) if mode == "all_gather" else otherwise


def _check_nonfinite(mode: str, xs: list[Tensor], rank: int, compressor: Taco) -> None:
    size = len(xs)
    clean = _whole(mode, xs, rank, compressor)
    assert bool(clean.isfinite().all())
    _block(xs[_owner(mode, size, 3, size - 1)], 3)[17] = float("nan")
    _block(xs[_owner(mode, size, 7, 0)], 7)[0] = float("inf")
    _block(xs[_owner(mode, size, 11, 0)], 11)[BLOCK - 1] = float("-inf")
    found = _whole(mode, xs, rank, compressor)
    for index in range(BLOCKS):
        if index in (3, 7, 11):
            assert bool(_block(found, index).isnan().all()), f"{mode} {compressor} block {index}"
        else:
            same = oracle.same_bits(_block(found, index), _block(clean, index))
            assert same, f"{mode} {compressor} block {index}"


def _nonfinite(rank: int, size: int) -> None:
    _each(rank, size, _check_nonfinite)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nan_and_inf_fill_their_block(run_ranks: RankRunner, world_size: int) -> None:
    """One such value on one rank makes its block NaN on every rank, and changes no other bit."""
    run_ranks(_nonfinite, world_size)


def _check_zero(mode: str, xs: list[Tensor], rank: int, compressor: Taco) -> None:
    size = len(xs)
    for x in xs:
        _block(x, 2).zero_()
        _block(x, 5).fill_(-0.0)
    # Zero on all ranks but one: the sum is that rank's alone.
    for other, x in enumerate(xs):
        if other != _owner(mode, size, 8, size - 1):
            _block(x, 8).zero_()
    found = _whole(mode, xs, rank, compressor)
    for index in (2, 5):
        zeros = torch.zeros(BLOCK, dtype=found.dtype)
        assert torch.equal(_block(found, index), zeros), f"{mode} {compressor} block {index}"
    alone = _block(xs[_owner(mode, size, 8, size - 1)], 8)
    assert oracle.relative_error(_block(found, 8), alone) < 0.06, f"{mode} {compressor}"
    assert not bool(found.isnan().any())


def _zero(rank: int, size: int) -> None:
    _each(rank, size, _check_zero)


@pytest.mark.parametrize("world_size", [2, 4])
def test_zero_blocks_are_exact(run_ranks: RankRunner, world_size: int) -> None:
    """A block that is zero everywhere stays zero; one that is zero elsewhere stays itself."""
    run_ranks(_zero, world_size)


def _check_outlier(mode: str, xs: list[Tensor], rank: int, compressor: Taco) -> None:
    size = len(xs)
    huge = 1e30 if xs[0].dtype != torch.float16 else 6e4
    clean = _whole(mode, xs, rank, compressor)
    _block(xs[_owner(mode, size, 4, 0)], 4)[5] = huge
    found = _whole(mode, xs, rank, compressor)
    for index in range(BLOCKS):
        if index != 4:
            same = oracle.same_bits(_block(found, index), _block(clean, index))
            assert same, f"{mode} {compressor} block {index}"
    spoilt = _block(found, 4)
    assert bool(spoilt.isfinite().all()), f"{mode} {compressor}"
    assert float(spoilt[5]) == pytest.approx(huge, rel=0.15)


def _outlier(rank: int, size: int) -> None:
    _each(rank, size, _check_outlier)


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_outlier_spoils_its_block_alone(run_ranks: RankRunner, world_size: int) -> None:
    """1e30 on one rank overflows nothing and leaves every other block as it was, to the bit."""
    run_ranks(_outlier, world_size)


def _check_repeat(mode: str, xs: list[Tensor], rank: int, compressor: Taco) -> None:
    runs = []
    for _ in range(2):
        sent: list[Tensor] = []
        group = dist.group.WORLD
        assert group is not None
        out = xs[rank].clone()
        part = out.chunk(len(xs))[rank].clone()

        def keep(payloads: Tensor, numel: int, sent: list[Tensor] = sent) -> None:
            assert payloads.shape[1] == compressor.payload_bytes(numel)
            sent.append(payloads.clone())

        if mode in ("one_shot", "two_shot"):
            all_reduce(out, group=group, compressor=compressor, algorithm=mode, on_payload=keep)
        elif mode == "all_gather":
            all_gather(out, part, group=group, compressor=compressor, on_payload=keep)
        else:
            reduce_scatter(part, out, group=group, compressor=compressor, on_payload=keep)
        assert len(sent) == 1
        rows = 1 if mode in ("one_shot", "all_gather") else len(xs)
        assert sent[0].shape[0] == rows
        runs.append((sent[0], out, part))
        torch.randn(100)  # the global generator has no say
    for first, second in zip(*runs, strict=True):
        assert oracle.same_bits(first, second), f"{mode} {compressor}"


def _repeat(rank: int, size: int) -> None:
    _each(rank, size, _check_repeat)


def test_the_same_input_gives_the_same_bytes(run_ranks: RankRunner) -> None:
    """Payloads and results repeat; on_payload sees once what this rank encoded."""
    run_ranks(_repeat, 3)
