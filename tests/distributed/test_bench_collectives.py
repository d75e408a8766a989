"""``bench collectives`` on gloo ranks: what it reports is what the collectives are."""

import json
import os
from pathlib import Path

import pytest

from megatron_taco.cli import main
from tests.ranks import RankRunner


def _bench(rank: int, world_size: int, words: list[str]) -> int:
    return main(["bench", "collectives", *words])


WORLD_SIZE = 3


def test_the_report(run_ranks: RankRunner, tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    words = [
        "--sizes",
        "64KiB,100001",
        "--formats",
        "int8,int4",
        "--repeats",
        "2",
        "--silence",
        "0us",
    ]
    words += ["--json", str(report)]
    codes = run_ranks(_bench, WORLD_SIZE, words, init=False, preload="torch")
    assert codes == [0] * WORLD_SIZE
    found = json.loads(report.read_text())
    assert found["usable"]
    assert found["place"] is None
    assert found["about"]["backend"] == "gloo"
    assert found["about"]["ranks"] == WORLD_SIZE
    assert found["about"]["chunks"] is None
    rows = found["rows"]
    assert len(rows) == 2 * (2 * 2 + 2 + 2)
    for row in rows:
        assert row["extra"] is None
        assert (row["rotation"], row["scales"]) == ("hadamard", "dual")
        assert row["size"] in (
            (64 << 10) // (2 * WORLD_SIZE) * 2 * WORLD_SIZE,
            100_001 // (2 * WORLD_SIZE) * 2 * WORLD_SIZE,
        )
        assert len(row["plain_s"]) == len(row["ours_s"]) == 2
        assert min(*row["plain_s"], *row["ours_s"]) > 0
        # Both calls did the same on the same tensors: design.md section 5, sums of codecs' errors.
        low, high = {"int8": (0.005, 0.012), "int4": (0.11, 0.19)}[row["format"]]
        assert low < row["error"] < high
        ranks_bytes = (WORLD_SIZE - 1) / WORLD_SIZE * row["size"]
        whole = 2 if row["operation"] == "all_reduce" else 1
        assert row["raw"] == pytest.approx(whole * ranks_bytes, abs=1)
        # One-shot sends the tensor to every other rank: P / 2 times as much as a ring.
        more = WORLD_SIZE / 2 if row["algorithm"] == "one_shot" else 1
        compression = {"int8": 1.94, "int4": 3.77}[row["format"]]
        assert more * row["raw"] / row["wire"] == pytest.approx(compression, rel=0.03)


def _bench_on_nodes(rank: int, world_size: int, nodes: list[str], words: list[str]) -> int:
    os.environ["NCCL_HOSTID"] = nodes[rank]
    return main(["bench", "collectives", *words])


def test_alternatives_and_nodes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """FP8 without rotation is in the table, and hierarchical where the ranks span nodes."""
    report = tmp_path / "bench.json"
    words = "--sizes 64KiB --formats e4m3,int8 --operations all_reduce --repeats 1 --silence 0us"
    words += f" --scales dual,merged_bf16 --chunks 2 --json {report}"
    nodes = ["a", "a", "b", "b"]
    codes = run_ranks(_bench_on_nodes, 4, nodes, words.split(), init=False, preload="torch")
    assert codes == [0] * 4
    found = json.loads(report.read_text())
    assert found["about"]["chunks"] == 2
    kinds = [(row["format"], row["rotation"], row["scales"]) for row in found["rows"]]
    assert sorted(set(kinds)) == [
        ("e4m3", "hadamard", "dual"),
        ("e4m3", "hadamard", "merged_bf16"),
        ("e4m3", "none", "dual"),
        ("e4m3", "none", "merged_bf16"),
        ("int8", "hadamard", "dual"),
        ("int8", "hadamard", "merged_bf16"),
    ]
    # Between nodes the hierarchical all-reduce sends half of what a two-shot sends.
    between = {row["algorithm"]: row["inter_node"] for row in found["rows"]}
    assert between["hierarchical"] == between["two_shot"] / 2 == between["one_shot"] / 4


def test_hierarchical_on_one_node_is_refused(run_ranks: RankRunner) -> None:
    words = ["--sizes", "64KiB", "--algorithms", "hierarchical", "--repeats", "1"]
    assert run_ranks(_bench, 2, words, init=False, preload="torch") == [2, 2]
