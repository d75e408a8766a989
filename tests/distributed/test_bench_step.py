"""``bench step`` on gloo ranks: the trainer trains, the arms take turns, bytes are right."""

import json
from pathlib import Path
from typing import Any

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
    words = [
        *MODEL,
        "--formats",
        "e4m3,int4,fp32",
        "--cycles",
        "2",
        "--steps",
        "1",
        "--settle",
        "0",
    ]
    words += ["--json", str(file), "--plot", str(plot), "--other", "megatron", str(other)]
    assert run_ranks(_bench, 2, words, init=False, timeout=120) == [0, 0]
    report = json.loads(file.read_text())
    assert report["usable"]
    assert report["about"]["backend"] == "gloo"
    assert report["about"]["num_layers"] == 2
    assert report["other_uncompressed"] == {"megatron": [0.5, 0.25, 0.25]}
    arms = {arm["arm"]: arm for arm in report["arms"]}
    assert list(arms) == ["plain", "e4m3", "int4", "fp32", "silent"]
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
    wide = arms["fp32"]
    assert (wide["calls"], wide["compressed"]) == (PER_MICRO_BATCH, 0)
    assert wide["wire"] == 2 * wide["raw"] == 2 * arms["plain"]["raw"]
    assert wide["limit"] <= 1
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


ONCE = ["--cycles", "1", "--steps", "1", "--settle", "0"]


def _report(run_ranks: RankRunner, ranks: int, folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "step.json"
    words = (*MODEL, *words, *ONCE, "--json", str(file))
    assert run_ranks(_bench, ranks, list(words), init=False, timeout=200) == [0] * ranks
    report: dict[str, Any] = json.loads(file.read_text())
    for arm in report["arms"]:
        sent = report["flows"][arm["arm"]]
        apart = ("pp.projector", "pp.codebook")  # exact, no activations
        counted = [row for flow, row in sent.items() if not flow.startswith(apart)]
        for name in ("raw", "wire"):
            assert arm[name] == round(sum(row[name] for row in counted) / ranks)
        if arm["limit"] is not None:
            assert 1 <= arm["limit"] <= arm["raw"] / arm["wire"]
    assert report["flows"]["silent"] == {}
    return report


def test_pipeline_stages(run_ranks: RankRunner, tmp_path: Path) -> None:
    """A model for each boundary; bytes as the boundaries have them, and the projectors' apart."""
    report = _report(
        run_ranks, 2, tmp_path, "--axis", "pipeline", "--boundaries", "mapl,mapl+int8,int8_hadamard"
    )
    assert list(report["flows"]) == ["plain", "mapl", "mapl+int8", "int8_hadamard", "silent"]
    tokens, rank, ids = 64 * 4, 16, 2  # of 4 micro-batches; bytes of an id
    exchange = {"mapl": 128 * rank * 4, "mapl+int8": 128 * rank * 4}
    wire = {"plain": tokens * 128 * 2, "mapl": tokens * rank * 2}
    for arm, sent in report["flows"].items():
        if arm == "silent":
            continue
        there, back = sent["pp.forward send"], sent["pp.backward send"]
        assert there["calls"] == back["calls"] == 4
        assert there["raw"] == back["raw"] == wire["plain"]
        if arm in wire:
            assert back["wire"] == wire[arm]
            assert there["wire"] == wire[arm] + (tokens * ids if arm == "mapl" else 0)
        swapped = sent.get("pp.projector exchange", {"wire": 0})
        assert swapped["wire"] == 2 * exchange.get(arm, 0)
    assert report["flows"]["mapl+int8"]["pp.backward send"]["wire"] < wire["mapl"] * 0.7
    work = {row["arm"]: row for row in report["work"]}
    assert list(work) == ["mapl", "mapl+int8", "int8_hadamard"]
    for arm, row in work.items():
        assert row["exchange_bytes"] == exchange.get(arm, 0)
        assert min(row["micro_batch_s"], row["compute_s"], row["share"]) > 0
    assert all(arm["peak_bytes"] == 0 for arm in report["arms"])


def test_data_parallel_ranks(run_ranks: RankRunner, tmp_path: Path) -> None:
    """With overlap, so that nothing is waited for where it starts; a method with memory too."""
    report = _report(
        run_ranks,
        2,
        tmp_path,
        "megatron.overlap_grad_reduce=true",
        "megatron.overlap_param_gather=true",
        "megatron.micro_batch_size=2",
        *("--axis", "data", "--compressors", "sdp4bit,e4m3,topk"),
    )
    arms = {arm["arm"]: arm for arm in report["arms"]}
    assert list(arms) == ["plain", "sdp4bit", "e4m3", "topk", "silent"]
    assert arms["plain"]["raw"] == arms["plain"]["wire"] > 0
    sent = report["flows"]
    for kind in ("attention", "mlp"):
        gradients = f"dp.gradients.{kind} reduce_scatter"
        assert sent["plain"][gradients]["compressed"] == 0
        assert sent["sdp4bit"][gradients]["raw"] == sent["plain"][gradients]["raw"]
        assert sent["sdp4bit"][gradients]["wire"] < 0.14 * sent["plain"][gradients]["raw"]
        assert sent["e4m3"][gradients]["wire"] < 0.27 * sent["plain"][gradients]["raw"]
    assert sent["topk"]["dp.gradients.topk reduce_scatter"]["compressed"] > 0
    assert arms["sdp4bit"]["limit"] >= arms["e4m3"]["limit"]


def test_all_axes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Tensor 2 x pipeline 2 x data 2: all, each alone, nothing."""
    report = _report(run_ranks, 8, tmp_path, "--axis", "all")
    assert list(report["flows"]) == ["plain", "all", "tensor", "pipeline", "data", "silent"]
    plain, every = report["flows"]["plain"], report["flows"]["all"]
    named = {
        "tensor": "tp.forward all_reduce",
        "pipeline": "pp.backward send",
        "data": "dp.gradients.mlp reduce_scatter",
    }
    for arm in named:
        for axis, flow in named.items():
            found = report["flows"][arm][flow]
            assert found == (every if arm == axis else plain)[flow]
            assert found["raw"] == plain[flow]["raw"]
            assert (found["wire"] < found["raw"]) == (arm == axis)
