"""``bench step`` on gloo ranks: the trainer trains, the arms take turns, bytes are right."""

import json
from pathlib import Path

import pytest

from megatron_taco.cli import main
from tests.ranks import RankRunner

MODEL = [
    "model.num_layers=2",
    "model.max_position_embeddings=64",
    "megatron.global_batch_size=4",
]
PER_MICRO_BATCH = 2 * 2 + 2 * 2 + 1 + 1
"""All-reduces of two layers each way, of the embedding and of the output layer's gradient."""
MESSAGE = 64 * 4 * 128 * 2
"""Bytes: sequence × micro-batch × hidden × 2."""


def _bench(rank: int, world_size: int, words: list[str]) -> int:
    return main(["bench", "step", *words])


def test_the_report(run_ranks: RankRunner, tmp_path: Path) -> None:
    file, plot = tmp_path / "step.json", tmp_path / "step.svg"
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"arms": [{"step_s": [0.5, 0.25, 0.25]}]}))
    words = [*MODEL, "--formats", "e4m3,int4", "--cycles", "2", "--steps", "1", "--settle", "0"]
    words += ["--json", str(file), "--plot", str(plot), "--other", "megatron", str(other)]
    assert run_ranks(_bench, 2, words, init=False, timeout=120) == [0, 0]
    report = json.loads(file.read_text())
    assert report["usable"]
    assert report["about"]["backend"] == "gloo"
    assert report["about"]["num_layers"] == 2
    assert report["other_uncompressed"] == {"megatron": [0.5, 0.25, 0.25]}
    arms = {arm["arm"]: arm for arm in report["arms"]}
    assert list(arms) == ["plain", "e4m3", "int4", "silent"]
    assert len(report["exposed"]) == 2
    for name, block_bytes in (("plain", 0), ("e4m3", 264), ("int4", 136)):
        arm = arms[name]
        assert arm["calls"] == PER_MICRO_BATCH
        assert arm["raw"] == PER_MICRO_BATCH * MESSAGE  # of two ranks each sends half, twice
        layers = PER_MICRO_BATCH - 2
        assert arm["compressed"] == (layers if block_bytes else 0)
        compressed = layers * MESSAGE // 2 // 256 * block_bytes if block_bytes else layers * MESSAGE
        assert arm["wire"] == compressed + 2 * MESSAGE
        assert min(arm["step_s"]) > 0
        assert len(arm["ratios"]) == (1 if name == "plain" else 2)
    # Without the collectives there is nothing to send.
    assert (arms["silent"]["calls"], arms["silent"]["wire"]) == (0, 0)
    assert 1 <= arms["e4m3"]["limit"] <= arms["e4m3"]["raw"] / arms["e4m3"]["wire"]
    assert arms["int4"]["limit"] >= arms["e4m3"]["limit"]
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_another_uncompressed_configuration(
    run_ranks: RankRunner, tmp_path: Path, sequence_parallel: bool
) -> None:
    """Compression is off, nothing of ours is in place; with sequence parallelism all arms run."""
    file = tmp_path / "step.json"
    words = [*MODEL, "--cycles", "1", "--steps", "1", "--settle", "0", "--json", str(file)]
    if sequence_parallel:
        words += ["--formats", "e4m3,auto"]
        words.insert(0, "megatron.sequence_parallel=true")
    else:
        words += ["--only", "megatron"]
    assert run_ranks(_bench, 2, words, init=False, timeout=120) == [0, 0]
    report = json.loads(file.read_text())
    arms = {arm["arm"]: arm for arm in report["arms"]}
    if not sequence_parallel:
        assert list(arms) == ["plain"]
        assert arms["plain"]["calls"] == 0
        assert len(arms["plain"]["step_s"]) == 2
        return
    assert list(arms) == ["plain", "e4m3", "auto", "silent"]
    # What the policy decides depends on this machine.
    assert arms["auto"]["calls"] == arms["plain"]["calls"]
    assert arms["e4m3"]["wire"] <= arms["auto"]["wire"] <= arms["plain"]["wire"]
    assert arms["auto"]["limit"] <= arms["e4m3"]["limit"]
    assert arms["e4m3"]["calls"] == arms["plain"]["calls"] > PER_MICRO_BATCH
    assert arms["e4m3"]["raw"] == arms["plain"]["raw"]
    assert arms["e4m3"]["wire"] < 0.7 * arms["e4m3"]["raw"]
    assert arms["silent"]["wire"] == 0


def test_a_mistake_in_the_configuration_is_one_message(run_ranks: RankRunner) -> None:
    words = ["model.num_layers=zwei", "--formats", "e4m3"]
    assert run_ranks(_bench, 2, words, init=False, timeout=120) == [2, 2]
