"""SparseLoCo in the trainer: replicas step apart, exchange, and go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_data_parallel import DP, digests, flows, near
from tests.distributed.training import OFF, losses, train, write_config
from tests.ranks import RankRunner

SPARSELOCO = (OFF, f"{DP}.mode=on", f"{DP}.gradients.compressor=sparseloco")
SGD = (
    "megatron.optimizer=sgd",
    "megatron.clip_grad=0",
    "megatron.lr=0.1",
    "megatron.sgd_momentum=0",
)
STAGES = "megatron.pipeline_model_parallel_size=2"


def settings(**given: float) -> tuple[str, ...]:
    return tuple(f"{DP}.gradients.{key}={value}" for key, value in given.items())


def test_exchanges_after_every_step_are_data_parallel_training(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """With SGD, the mean of weights after one step is the step by the mean of gradients.

    So a local step is of this replica's own gradient at its full size. Four ranks, of which two
    share the layers: what both hold copies of stays equal.
    """
    config = write_config(tmp_path)
    layout = (*SGD, "megatron.tensor_model_parallel_size=2", "megatron.train_iters=4")
    found: dict[str, list[dict[str, str]]] = {}
    for name, arm in (
        ("off", (OFF,)),
        ("on", (*SPARSELOCO, *settings(local_steps=1, ratio=1, bits=8, block=32))),
    ):
        overrides = [*layout, *arm, f"run.name={name}"]
        found[name] = run_ranks(train, 4, config, overrides, None, digests, init=False, timeout=200)
    assert near(losses(tmp_path, "on"), losses(tmp_path, "off"), 2e-3)
    assert losses(tmp_path, "off")[4] < losses(tmp_path, "off")[1]
    on = found["on"]
    assert on[0] == on[2]
    assert on[1] == on[3]
    assert all(on[0][name] == on[1][name] for name in on[0] if "norm" in name)


def test_rounds_resume_and_bytes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """PP 2 x DP 2 with a tied embedding; two plain steps first, then rounds of two steps.

    The checkpoint is from within a round: each replica's weights and moments are in it.
    """
    config = write_config(tmp_path)
    common = (
        *SPARSELOCO,
        *settings(local_steps=2, ratio=0.25, chunk=256),
        f"{DP}.start_step=2",
        STAGES,
        "megatron.overlap_grad_reduce=true",
        "megatron.ddp_bucket_size=20000",
        "megatron.train_iters=8",
    )
    arguments = [*common, "run.name=whole"]
    whole = run_ranks(train, 4, config, arguments, None, digests, init=False, timeout=200)
    assert whole[0] == whole[1]
    assert whole[2] == whole[3]
    assert (
        whole[0]["module.embedding.word_embeddings.weight"]
        == whole[2]["module.output_layer.weight"]
    )
    save = (f"megatron.save={tmp_path / 'saved'}", "megatron.save_interval=100")
    parts = [*common, *save, "megatron.exit_interval=5", "run.name=parts"]
    halves = run_ranks(train, 4, config, parts, None, digests, init=False, timeout=200)
    assert halves == [None] * 4
    load = [*common, f"megatron.load={tmp_path / 'saved'}", "run.name=parts"]
    resumed = run_ranks(train, 4, config, load, None, digests, init=False, timeout=200)
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    assert resumed == whole
    counted = flows(tmp_path, "whole")
    sent = counted["dp.gradients.sparseloco all_reduce"]
    assert sent["compressed"] == sent["calls"] * 6 / 8
    # Two plain steps of eight, and three exchanges of a quarter of the values.
    assert sent["wire_bytes"] < (2 / 8 + 3 / 8 * 0.25) * sent["raw_bytes"]
    embedding = counted["dp.gradients.tied_embedding all_reduce"]
    assert embedding["wire_bytes"] < embedding["raw_bytes"]
