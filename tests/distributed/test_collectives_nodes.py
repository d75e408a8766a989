"""Hierarchical all-reduce on groups that span nodes: contracts, byte counts, refusals."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_taco.collectives import Topology, all_reduce, traffic
from megatron_taco.collectives.nodes import node_id, places
from megatron_taco.collectives.router import Router
from megatron_taco.compressors import Taco
from megatron_taco.telemetry.counters import Counters, Flow
from tests.distributed import oracle
from tests.distributed.sent import counted
from tests.distributed.training import train, write_config
from tests.ranks import RankRunner

LAYOUTS = {
    "2 x 2": [[0, 1], [2, 3]],
    "2 x 2, alternating": [[0, 2], [1, 3]],
    "2 x 2, crossed": [[0, 3], [1, 2]],
    "2 x 4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4 x 2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "3 x 2": [[0, 1], [2, 3], [4, 5]],
}
BLOCK = 64


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _topology(rank: int, nodes: list[list[int]]) -> Topology:
    return Topology(next(f"node{i}" for i, ranks in enumerate(nodes) if rank in ranks))


def _values(rank: int, size: int, nodes: list[list[int]]) -> list[str]:
    group = _world()
    topology = _topology(rank, nodes)
    groups = topology.require(group)
    assert topology.of(group) is groups  # found out once
    assert groups.count == len(nodes)
    shared = []
    settings = [(Taco(block=BLOCK), torch.bfloat16)]
    if size == 4:
        settings += [
            (Taco(format="int6", block=BLOCK, scales="merged_bf16"), torch.float16),
            (Taco(format="int4", block=BLOCK, rotation="none"), torch.float32),
        ]
    for taco, dtype in settings:
        for numel in (1, 65, BLOCK * size, 3 * BLOCK * size + 1, 6001):
            xs = oracle.inputs(size, numel, dtype, seed=numel)
            expected = oracle.hierarchical(xs, nodes, taco)
            for chunks in (None, 3):
                for async_op in (False, True):
                    x = xs[rank].clone()
                    work = all_reduce(
                        x,
                        group=group,
                        compressor=taco,
                        algorithm="hierarchical",
                        nodes=groups,
                        chunks=chunks,
                        async_op=async_op,
                    )
                    if work is not None:
                        work.wait()
                    what = f"{taco} {dtype} {numel} in {chunks} chunks, async {async_op}"
                    assert oracle.same_bits(x, expected), what
            shared.append(oracle.digest(x))
    xs = oracle.inputs(size, 5 * BLOCK * size, torch.float32, seed=3)
    xs[size - 1][3 * BLOCK + 5] = float("nan")
    xs[0][7 * BLOCK] = float("inf")
    for x in xs:
        x[9 * BLOCK : 10 * BLOCK] = 0
    x = xs[rank].clone()
    all_reduce(x, group=group, compressor=Taco(block=BLOCK), nodes=groups)  # auto
    bad = x.view(-1, BLOCK).isnan()
    assert bad.all(1).nonzero().view(-1).tolist() == [3, 7]
    assert bool((bad.all(1) == bad.any(1)).all())
    assert not bool(x[9 * BLOCK : 10 * BLOCK].any())
    return [*shared, oracle.digest(x)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_values(run_ranks: RankRunner, layout: str) -> None:
    """The oracle's bits on every rank, in chunks or not, async or not; NaN, Inf and zeros."""
    nodes = LAYOUTS[layout]
    results = run_ranks(_values, sum(map(len, nodes)), nodes)
    assert all(shared == results[0] for shared in results)


def _error(rank: int, size: int) -> float:
    groups = _topology(rank, LAYOUTS["2 x 2"]).require(_world())
    xs = oracle.inputs(size, 3 << 15, torch.float32, seed=5)
    x = xs[rank].clone()
    all_reduce(x, group=_world(), compressor=Taco(), algorithm="hierarchical", nodes=groups)
    return oracle.relative_error(x, torch.stack(xs).double().sum(0))


def test_three_lossy_steps(run_ranks: RankRunner) -> None:
    """2.6% each, independent: sqrt(3) times as much."""
    for error in run_ranks(_error, 4):
        assert error == pytest.approx(0.026 * 3**0.5, rel=0.03)


def _bytes(rank: int, size: int) -> None:
    """What torch is given to send to others, inside and between nodes, is what traffic() says."""
    nodes = LAYOUTS["2 x 2"]
    groups = _topology(rank, nodes).require(_world())
    with counted() as sent:
        taco = Taco(block=BLOCK)
        for numel in (1, BLOCK, 4 * BLOCK, 4099):
            for chunks in (1, 3):
                sent.clear()
                x = torch.randn(numel, dtype=torch.bfloat16)
                all_reduce(x, group=_world(), compressor=taco, nodes=groups, chunks=chunks)
                expected = traffic(
                    "all_reduce",
                    "hierarchical",
                    numel,
                    2,
                    size,
                    taco.payload_bytes,
                    block=BLOCK,
                    nodes=2,
                )
                assert sent[groups.across] == expected.inter_node
                assert sum(sent.values()) == expected.wire


def test_traffic_is_what_is_sent(run_ranks: RankRunner) -> None:
    run_ranks(_bytes, 4)


def _refusals(rank: int, size: int) -> None:
    group = _world()
    for nodes, found in (
        ([[0, 1, 2, 3]], "'node0': 4"),
        ([[0, 1, 2], [3]], "'node0': 3, 'node1': 1"),
        ([[0], [1], [2], [3]], "'node0': 1, 'node1': 1, 'node2': 1, 'node3': 1"),
    ):
        topology = _topology(rank, nodes)
        assert topology.of(group) is None
        with pytest.raises(ValueError, match=rf"this group of 4 has \(node: ranks\) {found} "):
            topology.require(group)
    with pytest.raises(ValueError, match="needs the nodes of the group of 4"):
        all_reduce(torch.ones(8), group=group, compressor=Taco(), algorithm="hierarchical")
    for call in (0, -1):
        with pytest.raises(ValueError, match=f"chunks: got {call}, allowed: 1 or more"):
            all_reduce(torch.ones(8), group=group, compressor=Taco(), chunks=call)


def test_refusals(run_ranks: RankRunner) -> None:
    """Groups in which it has no use are refused with what was found, before any message."""
    run_ranks(_refusals, 4)


def _routed(rank: int, size: int, algorithm: str) -> tuple[str, int, int]:
    """An all-reduce through the router on a pair of ranks' own group inside a larger world."""
    counters = Counters([Flow("role", "all_reduce"), Flow("role", "reduce_scatter")])
    router = Router(
        compressor=Taco(block=BLOCK),
        algorithm=algorithm,
        roles=frozenset({"role"}),
        min_bytes=0,
        start_step=0,
        counter=lambda role, collective: counters[Flow(role, collective)],
        topology=_topology(rank, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    )
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    group = halves[rank // 4]
    assert isinstance(group, ProcessGroup)
    if rank >= 4:
        dist.barrier(group)  # the halves do not wait for each other to make their sub-groups
    xs = oracle.inputs(size, 5000, torch.bfloat16)
    mine = xs[rank // 4 * 4 : rank // 4 * 4 + 4]
    x = xs[rank].clone()
    for _ in range(2):
        x.copy_(xs[rank])
        router.all_reduce("role", x, group, False, lambda: pytest.fail("went plain"))
    expected = oracle.hierarchical(mine, [[0, 1], [2, 3]], Taco(block=BLOCK))
    assert oracle.same_bits(x, expected)
    part = torch.empty(1250, dtype=torch.bfloat16)
    router.reduce_scatter("role", part, xs[rank], group, False, lambda: pytest.fail("plain"))
    assert oracle.same_bits(part, oracle.reduce_scatter(mine, rank % 4, Taco(block=BLOCK)))
    count = counters[Flow("role", "all_reduce")]
    return oracle.digest(x), count.compressed, count.wire


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_the_router_finds_the_nodes(run_ranks: RankRunner, algorithm: str) -> None:
    """Two groups of 2 x 2 side by side in one world; each finds its nodes by itself."""
    results = run_ranks(_routed, 8, algorithm)
    assert results[0] == results[3] != results[4] == results[7]
    # 79 blocks: 20 for each of four pieces; 2 x 2 + 2 messages of a piece.
    assert results[0][1:] == (2, 2 * 6 * 20 * (BLOCK + 8))


def test_places() -> None:
    assert places(["b", "a", "b", "a"]) == [[0, 2], [1, 3]]
    assert places(["x"]) == [[0]]


def test_node_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's variable, if it is set, else the host name."""
    monkeypatch.setenv("NCCL_HOSTID", "rack7")
    assert node_id() == "rack7"
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setattr("socket.gethostname", lambda: "somewhere")
    assert node_id() == "somewhere"


def _train(rank: int, size: int, config: str, nodes: list[str], expected_code: int) -> str:
    def before(rank: int) -> None:
        os.environ["NCCL_HOSTID"] = nodes[rank]

    overrides = [f"megatron.tensor_model_parallel_size={size}", "megatron.train_iters=1"]
    overrides += ["compression.tensor_parallel.algorithm=hierarchical"]
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        train(rank, size, config, overrides, before, expected_code=expected_code)
    return output.getvalue()


def test_the_trainer_on_nodes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Tensor parallelism over two nodes of two; one node is refused before the first step."""
    config = write_config(tmp_path)
    run_ranks(_train, 4, config, ["a", "a", "b", "b"], 0, init=False, preload="megatron")
    said = run_ranks(_train, 2, config, ["a"] * 2, 2, init=False, preload="megatron")
    assert "compression.tensor_parallel.algorithm: hierarchical needs a group" in said[0]
    assert "Traceback" not in "".join(said)
