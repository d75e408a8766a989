"""Training with compressed data parallelism: replicas, layouts, resuming, bytes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import oracle
from tests.distributed.training import (
    DISTRIBUTED_OPTIMIZER,
    OFF,
    losses,
    metrics,
    train,
    write_config,
)
from tests.ranks import RankRunner

DP = "compression.data_parallel"
ON = (OFF, f"{DP}.mode=on", f"{DP}.min_bytes=1KiB")
SDP4BIT = (*ON, DISTRIBUTED_OPTIMIZER, f"{DP}.weights.compressor=sdp4bit")
OVERLAP = ("megatron.overlap_grad_reduce=true",)
OVERLAP_BOTH = (*OVERLAP, "megatron.overlap_param_gather=true")
# Without overlap Megatron makes one bucket; with it, this size makes the same one.
ONE_BUCKET = "megatron.ddp_bucket_size=1000000000"


def digests(model: list[Any]) -> dict[str, str]:
    """A hash of every parameter of this rank, once all gathers are done."""
    found = {}
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
        for name, parameter in chunk.module.named_parameters():
            found[name] = oracle.digest(parameter)
    return found


def run(
    run_ranks: RankRunner, ranks: int, config: str, name: str, *overrides: str
) -> dict[str, str]:
    """Train; all ranks must end with the same weights, whose hashes are returned."""
    arguments = [*overrides, f"run.name={name}"]
    found = run_ranks(train, ranks, config, arguments, None, digests, init=False, timeout=150)
    assert len(found[0]) > 20
    assert all(other == found[0] for other in found)
    return found[0]


def flows(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    return next(line for line in metrics(folder, name) if line["event"] == "end")["flows"]


def near(found: dict[int, float], wanted: dict[int, float], bound: float) -> bool:
    assert found.keys() == wanted.keys()
    return all(abs(found[step] - wanted[step]) < bound * wanted[step] for step in wanted)


STEPS = 4


def test_sdp4bit_replicas_overlap_buckets_resume_and_bytes(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """Distributed optimiser: overlap and stopping change no bit, bucket sizes little.

    Rounding is stochastic, which must not depend on what is done when. A checkpoint of two ranks
    goes on with four.
    """
    config = write_config(tmp_path)
    short = f"megatron.train_iters={STEPS}"
    run(run_ranks, 2, config, "off", OFF, DISTRIBUTED_OPTIMIZER, short)
    on = (*SDP4BIT, short)
    plain = run(run_ranks, 2, config, "plain", *on)
    one = (*on, *OVERLAP_BOTH, ONE_BUCKET)
    overlapped = run(run_ranks, 2, config, "overlap", *one)
    assert losses(tmp_path, "overlap") == losses(tmp_path, "plain")
    assert overlapped == plain

    folder = f"{tmp_path / 'saved'}"
    save = (f"megatron.save={folder}", "megatron.save_interval=2", "megatron.exit_interval=2")
    arguments = [*one, *save, "run.name=parts"]
    run_ranks(train, 2, config, arguments, init=False, timeout=150)
    load = f"megatron.load={folder}"
    resumed = run(run_ranks, 2, config, "parts", *one, load)
    assert losses(tmp_path, "parts") == losses(tmp_path, "plain")
    assert resumed == plain
    # Megatron spreads masters and moments anew over four ranks, whose batches are other parts.
    run(run_ranks, 4, config, "four", *one, load)
    four = losses(tmp_path, "four")
    assert set(four) == {3, 4}
    assert near(four, {step: losses(tmp_path, "plain")[step] for step in four}, 0.005)

    small = run(run_ranks, 2, config, "small", *on, *OVERLAP_BOTH, "megatron.ddp_bucket_size=5000")
    assert small != plain
    reference = losses(tmp_path, "off")
    for name in ("plain", "small"):
        assert near(losses(tmp_path, name), reference, 0.01), name
        assert losses(tmp_path, name) != reference
    buckets = flows(tmp_path, "small")["dp.gradients.mlp reduce_scatter"]["calls"] / STEPS / 2
    assert buckets > 4

    counted = flows(tmp_path, "plain")
    for kind in ("attention", "mlp"):
        gradients = counted[f"dp.gradients.{kind} reduce_scatter"]
        assert gradients["wire_bytes"] < 0.14 * gradients["raw_bytes"]
        assert gradients["calls"] == gradients["compressed"] == STEPS * 2
        assert 0.08 < gradients["error"] < 0.2
    # An exact gather of the weights comes first, then a compressed one a step.
    mlp = counted["dp.weights.mlp all_gather"]
    assert (mlp["calls"], mlp["compressed"]) == ((STEPS + 1) * 2, STEPS * 2)
    exact = mlp["raw_bytes"] / (STEPS + 1)
    assert mlp["wire_bytes"] - exact < 0.26 * exact * STEPS
    norms = counted["dp.gradients.norm reduce_scatter"]
    assert norms["compressed"] == 0
    assert norms["wire_bytes"] <= norms["raw_bytes"] + STEPS * 2 * 16


def test_four_ranks_all_reduce_with_average_and_bf16(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Without the distributed optimiser: two-shot, small buckets, excluded kinds, BF16 sums.

    Resumed to the bit. With it, and two nodes of two ranks: two hops.
    """
    config = write_config(tmp_path)
    base = (
        "megatron.ddp_average_in_collective=true",
        "megatron.grad_reduce_in_bf16=true",
        f"megatron.train_iters={STEPS}",
        *OVERLAP,
        "megatron.ddp_bucket_size=5000",
    )
    run(run_ranks, 4, config, "off", OFF, *base)
    taco = (
        *ON, *base, "telemetry.error_every=1",
        f"{DP}.gradients.compressor=taco", f"{DP}.exclude=[embedding]", f"{DP}.start_step=2",
    )  # fmt: skip
    folder = tmp_path / "saved"
    save = (f"megatron.save={folder}", "megatron.save_interval=3")
    load = (f"megatron.load={folder}", "megatron.ckpt_step=3")
    whole = run(run_ranks, 4, config, "on", *taco, *save)
    assert run(run_ranks, 4, config, "resumed", *taco, *load) == whole
    found, reference = losses(tmp_path, "on"), losses(tmp_path, "off")
    assert near(found, reference, 0.01)
    assert [found[step] for step in (1, 2)] == [reference[step] for step in (1, 2)]
    assert found[4] != reference[4]
    assert losses(tmp_path, "resumed") == {4: found[4]}
    counted = flows(tmp_path, "on")
    embedding = counted["dp.gradients.embedding all_reduce"]
    assert embedding["compressed"] == 0
    two_hops = ("megatron.train_iters=2", f"{DP}.gradients.ranks_per_node=2")
    run(run_ranks, 4, config, "nodes", *SDP4BIT, *OVERLAP_BOTH, *two_hops)
    assert abs(losses(tmp_path, "nodes")[2] - reference[2]) < 0.01 * reference[2]
    hops = flows(tmp_path, "nodes")
    inside = hops["dp.gradients.mlp inside_node"]
    between = hops["dp.gradients.mlp reduce_scatter"]
    assert inside["calls"] == inside["compressed"] == between["compressed"] == 2 * 4
    # Inside a node half of the bucket moves at 8 bits for 32, between nodes a quarter at 4.
    assert inside["raw_bytes"] == 2 * between["raw_bytes"]
    assert inside["wire_bytes"] < 0.27 * inside["raw_bytes"]
    assert between["wire_bytes"] < 0.14 * between["raw_bytes"]
    attention = counted["dp.gradients.attention all_reduce"]
    assert attention["compressed"] == attention["calls"] // 2
    assert 0.01 < attention["error"] < 0.03


def test_one_rank_is_refused_by_name(run_ranks: RankRunner, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 1, config, list(ON), init=False, timeout=100)
    message = "compression.data_parallel.mode: on with a data-parallel size of 1"
    assert message in " ".join(str(caught.value).split())


def test_with_compressed_tensor_parallelism_copies_stay_equal(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """TP 2 x DP 2, both axes on: replicas are equal, and so is what both TP ranks hold."""
    config = write_config(tmp_path)
    overrides = [
        *SDP4BIT,
        "compression.tensor_parallel.mode=on",
        "megatron.tensor_model_parallel_size=2",
        "model.position_embedding_type=learned_absolute",
        "megatron.train_iters=3",
    ]
    found = run_ranks(train, 4, config, overrides, None, digests, init=False, timeout=200)
    assert found[0] == found[2]
    assert found[1] == found[3]
    copies = [name for name in found[0] if found[0][name] == found[1][name]]
    assert "module.embedding.position_embeddings.weight" in copies
    assert all(name in copies for name in found[0] if "norm" in name)
    assert "module.embedding.word_embeddings.weight" not in copies
    counted = flows(tmp_path, "run")
    assert counted["tp.forward all_reduce"]["compressed"] > 0
    assert counted["dp.gradients.replicated reduce_scatter"]["compressed"] == 0
    assert counted["dp.gradients.mlp reduce_scatter"]["compressed"] == 3 * 4


def test_tied_copies_over_the_pipeline_and_skipped_steps(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """FP16 with a loss scale that overflows at first: NaN travels, steps are skipped, and then
    both copies of the tied embedding and all replicas are still the same."""
    config = write_config(tmp_path)
    overrides = [
        *SDP4BIT,
        *OVERLAP_BOTH,
        "megatron.pipeline_model_parallel_size=2",
        "megatron.bf16=false",
        "megatron.fp16=true",
        "megatron.initial_loss_scale=8388608",
        "megatron.check_for_nan_in_loss_and_grad=false",
        "megatron.hysteresis=1",
        "megatron.train_iters=9",
    ]
    found = run_ranks(train, 4, config, overrides, None, digests, init=False, timeout=200)
    stages: dict[str, list[dict[str, str]]] = {"first": [], "last": []}
    for rank in found:
        stages["last" if "module.output_layer.weight" in rank else "first"].append(rank)
    for replicas in stages.values():
        assert len(replicas) == 2
        assert replicas[0] == replicas[1]
    first, last = stages["first"][0], stages["last"][0]
    assert first["module.embedding.word_embeddings.weight"] == last["module.output_layer.weight"]
    steps = [line for line in metrics(tmp_path) if line["event"] == "step"]
    skipped = [line["skipped"] for line in steps]
    assert skipped[0]
    assert not skipped[-1]
    counted = flows(tmp_path, "run")
    assert counted["dp.gradients.mlp reduce_scatter"]["nonfinite_blocks"] > 0
    assert counted["dp.gradients.tied_embedding reduce_scatter"]["compressed"] > 0
    assert counted["dp.weights.tied_embedding all_gather"]["compressed"] == 0


def test_three_axes_at_once(run_ranks: RankRunner, tmp_path: Path) -> None:
    """TP 2 x PP 2 x DP 2: replicas are equal, all three axes are counted, with their costs.

    Losses over 90 steps are in docs/results/three-axes.md.
    """
    config = write_config(tmp_path)
    overrides = [
        *SDP4BIT,
        "compression.tensor_parallel.mode=on",
        "compression.pipeline_parallel.mode=on",
        "compression.pipeline_parallel.boundary=mapl",
        "compression.pipeline_parallel.rank=32",
        "megatron.tensor_model_parallel_size=2",
        "megatron.pipeline_model_parallel_size=2",
        "megatron.train_iters=2",
    ]
    found = run_ranks(train, 8, config, overrides, None, digests, init=False, timeout=300)
    # Megatron numbers ranks by tensor, then data, then pipeline rank.
    assert all(found[rank] == found[rank + 2] for rank in (0, 1, 4, 5))
    assert found[0] != found[4]
    end = next(line for line in metrics(tmp_path) if line["event"] == "end")
    for flow in (
        "tp.forward all_reduce",
        "pp.forward send",
        "pp.backward send",
        "dp.gradients.mlp reduce_scatter",
        "dp.weights.mlp all_gather",
    ):
        assert end["flows"][flow]["compressed"] > 0, flow
    axes = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    assert list(end["costs"]) == [f"compression.{axis}" for axis in axes]
    # A projector of 64 x 32 with its momentum, and anchors.
    assert end["costs"]["compression.pipeline_parallel"]["state_bytes"] > 2 * 64 * 32 * 4
    for cost in end["costs"].values():
        assert cost["buffer_bytes"] > 0
        assert cost["host_ms_per_step"] > 0
