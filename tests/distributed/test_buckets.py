"""Collectives of buckets against a local oracle: sums, exact kinds, weights, NaN, any size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_taco.collectives import buckets, two_level
from megatron_taco.collectives.nodes import Topology
from megatron_taco.collectives.segments import Slice, runs_of, slice_of
from megatron_taco.compressors import BlockInteger, Compressor, Taco
from tests.distributed import oracle
from tests.ranks import RankRunner

# Odd sizes and sizes of one; kinds alternate, so slices cut through them.
PLACES = [
    (0, 1, "norm"),
    (1, 700, "attention"),
    (704, 705, "mlp"),
    (705, 1300, "mlp"),
    (1300, 1333, "norm"),
    (1333, 2047, "attention"),
    (2050, 2051, "norm"),
]
COMPRESSORS: tuple[Compressor, ...] = (
    BlockInteger(),
    BlockInteger(8, 512, 1, "fp32"),
    BlockInteger(4, 64, 32, "fp32", "stochastic"),
    Taco(block=64),
)
DTYPES = (torch.float32, torch.bfloat16)


def cut(numel: int, size: int, dtype: torch.dtype, code: Compressor) -> tuple[Slice, ...]:
    width = -(-numel // size)
    return tuple(
        slice_of(
            runs_of(PLACES, numel),
            min(r * width, numel),
            min((r + 1) * width, numel),
            exact=lambda kind: kind == "norm",
            itemsize=dtype.itemsize,
            payload_bytes=code.payload_bytes,
        )
        for r in range(size)
    )


def codec_of(code: Compressor, rank: int) -> buckets.Codec:
    def codec(direction: str, index: int, kind: str) -> Compressor:
        if isinstance(code, BlockInteger):
            return code.keyed(hash_of(direction, index, kind, rank))
        return code

    return codec


def hash_of(direction: str, index: int, kind: str, rank: int) -> int:
    return ["reduce", "result"].index(direction) * 1000 + index * 100 + len(kind) * 10 + rank


def decoded(code: Compressor, values: torch.Tensor) -> torch.Tensor:
    return code.decode(code.encode(values), values.shape, torch.float32)


def reduced_by_hand(
    xs: list[torch.Tensor], piece: Slice, index: int, code: Compressor, average: bool
) -> dict[str, torch.Tensor]:
    """FP32 sums of one slice's parts: encoded by each rank, decoded, added in rank order."""
    found = {}
    for part in piece.parts:
        rows = []
        for rank, x in enumerate(xs):
            values = part.take(x)
            keyed = codec_of(code, rank)("reduce", index, part.kind)
            rows.append(values.float() if part.exact else keyed.encode(values))
        if part.exact:
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
        else:
            total = code.decode_sum(torch.stack(rows), part.numel)
        found[part.kind] = total / len(xs) if average else total
    return found


def check_reduce_scatter(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    numel = 684 * 12 // 4  # divisible by 2, 3 and 4; the bucket ends in padding
    for code in COMPRESSORS:
        for dtype in DTYPES:
            for average in (False, True):
                xs = oracle.inputs(size, numel, dtype, seed=3)
                slices, bucket = cut(numel, size, dtype, code), xs[rank].clone()
                width = numel // size
                output = bucket[rank * width : (rank + 1) * width]
                seen: list[str] = []
                work = buckets.reduce_scatter(
                    output, bucket, slices=slices, group=group, codec=codec_of(code, rank),
                    average=average, on_part=lambda kind, *_: seen.append(kind),  # noqa: B023
                )  # fmt: skip
                work.wait()
                assert "norm" not in seen
                assert len(seen) == sum(not part.exact for s in slices for part in s.parts)
                sums = reduced_by_hand(xs, slices[rank], rank, code, average)
                wanted = torch.zeros(numel, dtype=dtype)
                for part in slices[rank].parts:
                    part.put(sums[part.kind], wanted)
                mine = wanted[rank * width : (rank + 1) * width]
                assert oracle.same_bits(output, mine), f"{code} {dtype} {average}"
                exact = sum(x.double() for x in xs)[rank * width : (rank + 1) * width]
                exact = exact / size if average else exact
                assert oracle.relative_error(output, exact) < 0.2


def check_all_reduce(rank: int, size: int) -> list[str]:
    group, shared = dist.group.WORLD, []
    assert group is not None
    for numel in (2051, 2060):  # no multiple of any size
        for code in COMPRESSORS:
            for dtype in DTYPES:
                for pieces in (1, size):
                    xs = oracle.inputs(size, numel, dtype, seed=4)
                    bucket = xs[rank].clone()
                    work = buckets.all_reduce(
                        bucket, slices=cut(numel, pieces, dtype, code), group=group,
                        codec=codec_of(code, rank), average=True, on_part=lambda *_: None,
                    )  # fmt: skip
                    work.wait()
                    exact = sum(x.double() for x in xs) / size
                    assert oracle.relative_error(bucket, exact) < 0.25, f"{code} {dtype} {pieces}"
                    for start, stop, kind in PLACES:
                        if kind == "norm":
                            total = torch.zeros(stop - start)
                            for x in xs:
                                total += x[start:stop].float()
                            mean = (total / size).to(dtype)
                            assert oracle.same_bits(bucket[start:stop], mean)
                    shared.append(oracle.digest(bucket))
    return shared


def check_weights(rank: int, size: int) -> list[str]:
    """Differences bring every rank to the same weights, nearer and nearer to the masters."""
    group, shared = dist.group.WORLD, []
    assert group is not None
    numel = 2052
    width = numel // size
    own = slice(rank * width, (rank + 1) * width)
    for code in (BlockInteger(4, 2048, 1, "fp32"), BlockInteger(8, 128, 1, "fp32")):
        for add in (True, False):
            masters = torch.randn(numel, generator=torch.Generator().manual_seed(7))
            weights = torch.zeros(numel, dtype=torch.bfloat16)
            slices = cut(numel, size, torch.bfloat16, code)
            errors = []
            for _ in range(8):
                changes = masters[own] - weights[own].float() if add else masters[own].clone()
                for part in slices[rank].parts:
                    if part.exact:
                        part.put(part.take(masters).bfloat16(), weights)
                work = buckets.all_gather_changes(
                    weights, changes, slices=slices, group=group, codec=codec_of(code, rank),
                    add=add, on_part=lambda *_: None,
                )  # fmt: skip
                work.wait()
                errors.append(oracle.relative_error(weights, masters))
                shared.append(oracle.digest(weights))
            for start, stop, kind in PLACES:
                if kind == "norm":
                    assert oracle.same_bits(weights[start:stop], masters[start:stop].bfloat16())
            rounding = oracle.relative_error(masters.bfloat16(), masters)
            assert errors[-1] < 2 * rounding if add else errors[-1] > 2 * rounding
    return shared


def check_nan(rank: int, size: int) -> list[str]:
    """A NaN makes its block NaN on every rank and nothing else."""
    group = dist.group.WORLD
    assert group is not None
    numel, code = 2051, BlockInteger(4, 128, 32, "bf16")
    shared = []
    for pieces in (1, size):
        bucket = oracle.inputs(size, numel, torch.float32, seed=5)[rank]
        if rank == size - 1:
            bucket[900] = float("nan")
            bucket[1310] = float("inf")
        counted: list[torch.Tensor] = []

        def count(
            kind: str, values: torch.Tensor, payload: torch.Tensor, compressor: Compressor
        ) -> None:
            counted.append(compressor.nonfinite_blocks(payload, values.numel()))  # noqa: B023

        work = buckets.all_reduce(
            bucket, slices=cut(numel, pieces, torch.float32, code), group=group,
            codec=codec_of(code, rank), average=False, on_part=count,
        )  # fmt: skip
        work.wait()
        bad = (~bucket.isfinite()).nonzero().view(-1).tolist()
        assert {900, 1310} <= set(bad)
        assert len(bad) <= 2 * 128 + 1
        assert all(700 <= place < 1300 for place in bad if place != 1310)
        assert int(sum(counted)) == int(rank == size - 1)
        shared.append(oracle.digest(bucket))
    return shared


def all_checks(rank: int, size: int) -> list[str]:
    check_reduce_scatter(rank, size)
    return check_all_reduce(rank, size) + check_weights(rank, size) + check_nan(rank, size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bucket_collectives(run_ranks: RankRunner, world_size: int) -> None:
    results = run_ranks(all_checks, world_size, timeout=120)
    assert len(results[0]) > 60
    assert all(shared == results[0] for shared in results)


def check_two_level(rank: int, size: int) -> None:
    """Two nodes of two: 8 bits inside, 4 bits between, each rank's slice as computed by hand."""
    numel, fine_code, coarse_code = 2052, BlockInteger(8, 512, 1, "fp32"), BlockInteger()
    group = dist.group.WORLD
    assert group is not None
    assert two_level.nodes_of(group, Topology("all on one")) is None
    assert two_level.nodes_of(group, Topology(str(rank))) is None
    for node, ranks in ((rank // 2, ((0, 1), (2, 3))), (rank % 2, ((0, 2), (1, 3)))):
        nodes = two_level.nodes_of(group, Topology(str(node)))
        assert nodes is not None
        assert nodes.ranks == ranks
        for dtype in DTYPES:
            for average in (False, True):
                xs = oracle.inputs(size, numel, dtype, seed=6)
                bucket, width = xs[rank].clone(), numel // size
                fine = cut(numel, size, dtype, fine_code)
                coarse = cut(numel, size, torch.float32, coarse_code)
                output = bucket[rank * width : (rank + 1) * width]
                work = two_level.reduce_scatter(
                    output, bucket, nodes=nodes, fine=fine, coarse=coarse,
                    fine_codec=lambda *_: fine_code, coarse_codec=lambda *_: coarse_code,
                    average=average, on_fine=lambda *_: None, on_coarse=lambda *_: None,
                )  # fmt: skip
                work.wait()
                wanted = torch.zeros(numel, dtype=dtype)
                for part in coarse[rank].parts:
                    node_sums = []
                    for members in ranks:
                        rows = [part.take(xs[member]) for member in members]
                        if part.exact:
                            node_sums.append(rows[0].float() + rows[1].float())
                        else:
                            payloads = torch.stack([fine_code.encode(row) for row in rows])
                            node_sums.append(fine_code.decode_sum(payloads, part.numel))
                    if part.exact:
                        total = node_sums[0] + node_sums[1]
                    else:
                        payloads = torch.stack([coarse_code.encode(row) for row in node_sums])
                        total = coarse_code.decode_sum(payloads, part.numel)
                    part.put(total / size if average else total, wanted)
                mine = wanted[rank * width : (rank + 1) * width]
                assert oracle.same_bits(output, mine), f"{ranks} {dtype} {average}"


def test_two_hops(run_ranks: RankRunner) -> None:
    run_ranks(check_two_level, 4)
