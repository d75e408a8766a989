"""``bench collectives`` on gloo ranks: what it reports is what the collectives are."""

import json
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
    rows = found["rows"]
    assert len(rows) == 2 * (2 * 2 + 2 + 2)
    for row in rows:
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
