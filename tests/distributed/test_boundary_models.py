"""What boundaries ask of the model around them: anchors that begin as the embedding, subspaces."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import OFF, SP, TP2_PP2, losses, metrics, train, write_config
from tests.ranks import RankRunner

SECTION = "compression.pipeline_parallel"
ON = (
    OFF,
    f"{SECTION}.mode=on",
    f"{SECTION}.rank=16",
    f"{SECTION}.check_every=1",
    "model.make_vocab_size_divisible_by=64",
)
USED = 128
"""Ids that the data can have; the other rows are padding."""


@dataclass
class Tables:
    """What a rank has of the embedding and of the anchors, by segment."""

    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    bases: dict[str, torch.Tensor] = field(default_factory=dict)
    embedding: torch.Tensor | None = None


BEGUN = Tables()
"""Of this process when training begins."""


def look_at(chains: Any, weight: torch.Tensor | None, into: Tables) -> None:
    for chain in chains:
        for name, anchor in chain.anchors.items():
            into.anchors[name] = anchor.table.detach().clone()
            if hasattr(anchor, "basis"):
                into.bases[name] = anchor.basis.clone()
    if weight is not None:
        into.embedding = weight.detach().clone()


def record_start(rank: int) -> None:
    from megatron_taco.patching import boundary_start, pipeline

    def start_anchors(chains: Any, weight: Any, *groups: Any) -> None:
        boundary_start.start_anchors(chains, weight, *groups)
        look_at(chains, weight, BEGUN)

    boundary_start.ROWS = 40  # several messages
    pipeline.start_anchors = start_anchors


def both(model: Any) -> tuple[Tables, Tables]:
    """The tables at the beginning and now."""
    from megatron_taco.patching.boundary_chunk import ChunkBoundaries

    now = Tables()
    for chunk in model:
        modules = list(chunk.modules())
        chains = [module.chain for module in modules if isinstance(module, ChunkBoundaries)]
        embeddings = [module for module in modules if hasattr(module, "word_embeddings")]
        weight = embeddings[0].word_embeddings.weight if embeddings else None
        look_at(chains, weight, now)
    return BEGUN, now


@pytest.mark.parametrize("kind", ["factorised", "full"])
def test_anchors_begin_as_the_embedding_and_do_not_decay(
    run_ranks: RankRunner, tmp_path: Path, kind: str
) -> None:
    """Rows of ids that never occur have no gradient: weight decay alone could change them."""
    overrides = [
        *(*ON, *TP2_PP2, SP, "megatron.train_iters=2", "megatron.weight_decay=0.5"),
        *("megatron.use_distributed_optimizer=true", f"{SECTION}.anchors={kind}"),
        "model.make_vocab_size_divisible_by=96",
    ]
    found = run_ranks(
        train, 4, write_config(tmp_path), overrides, record_start, both, init=False, timeout=180
    )
    shards = [found[rank][0].embedding for rank in (0, 1)]
    assert all(shard is not None for shard in shards)
    embedding = torch.cat([shard for shard in shards if shard is not None])
    assert len(embedding) > USED
    assert embedding.std() > 0.01
    for rank, (begun, now) in enumerate(found):
        (segment,) = begun.anchors
        assert segment == ("0" if rank < 2 else "1")
        expected = embedding.float()
        if kind == "factorised":
            expected = expected @ begun.bases[segment].t()
        assert torch.equal(begun.anchors[segment], found[rank ^ 1][0].anchors[segment])
        torch.testing.assert_close(
            begun.anchors[segment], expected.to(embedding.dtype), rtol=1e-2, atol=1e-5
        )
        assert torch.equal(now.anchors[segment][USED:], begun.anchors[segment][USED:])
        assert not torch.equal(now.anchors[segment][:USED], begun.anchors[segment][:USED])
    # The embedding itself decays, padding included.
    last = found[1][1].embedding
    assert last is not None
    assert not torch.equal(last[-1], embedding[-1])


NETWORK = (
    *ON,
    f"{SECTION}.boundary=subspace",
    f"{SECTION}.after_layers=[1, 2]",
    f"{SECTION}.move_every=2",
    f"{SECTION}.move_length=0.2",
    "model.untie_embeddings_and_output_weights=true",
    "model.add_bias_linear=true",
    "megatron.train_iters=5",
)
FP32 = "megatron.bf16=false"


def distances(model: Any) -> dict[str, float]:
    """How far outside of the subspace each parameter is that has a right to be in it."""
    from megatron.core.models.gpt import GPTModel

    from megatron_taco.patching.boundary_chunk import ChunkBoundaries
    from megatron_taco.patching.subspace_model import constrained

    found: dict[str, float] = {}
    for chunk in model:
        gpt = next(module for module in chunk.modules() if isinstance(module, GPTModel))
        ours = next(module for module in chunk.modules() if isinstance(module, ChunkBoundaries))
        boundary = next(iter(ours.boundaries.values()))
        assert boundary.projector is not None
        u = boundary.projector.a
        for each in constrained(gpt, ours.span.depths):
            parameter: Any = each.parameter
            for name, tensor in (("", parameter), (" master", getattr(parameter, "main_param", 0))):
                if isinstance(tensor, torch.Tensor):
                    columns = tensor.detach().float()
                    columns = columns.t() if each.embedding else columns
                    outside = columns - u @ (u.t() @ columns)
                    found[each.name + name] = float(outside.norm() / columns.norm())
        # Layer 3 is one of the last two, and comes after the last boundary.
        for layer in gpt.decoder.layers:
            if layer.layer_number == 3:
                weight = layer.mlp.linear_fc2.weight.detach().float()
                found["free"] = float((weight - u @ (u.t() @ weight)).norm() / weight.norm())
        found["orthonormality"] = float((u.t() @ u - torch.eye(u.shape[1])).abs().max())
    return found


def test_a_subspace_network_trains_moves_and_resumes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """In one process, resumed, and in stages that begin with its checkpoint: the same losses."""
    config, saved = write_config(tmp_path), tmp_path / "saved"

    def run(name: str, ranks: int, *more: str) -> list[dict[str, float]]:
        overrides = [*NETWORK, f"run.name={name}", *more]
        return run_ranks(
            train, ranks, config, overrides, None, distances, init=False, timeout=180
        )  # fmt: skip

    (whole,) = run("whole", 1, FP32, f"megatron.save={saved}", "megatron.save_interval=3")
    assert whole.pop("free") > 0.5
    assert sum(name.endswith("weight") for name in whole) == 1 + 2 * 2
    assert sum(name.endswith("bias") for name in whole) == 2 * 2
    assert max(whole.values()) < 1e-5
    steps = [line for line in metrics(tmp_path, "whole") if line["event"] == "step"]
    moved = [line.get("boundaries", {}).get("after_layer_2", {}).get("moved") for line in steps]
    assert [each is not None for each in moved] == [False, True, False, True, False]
    assert all(0.01 < each < 0.2 / 16**0.5 * 1.001 for each in moved if each is not None)

    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    run("resumed", 1, FP32, f"megatron.load={saved}")
    expected = {step: loss for step, loss in losses(tmp_path, "whole").items() if step > 3}
    assert losses(tmp_path, "resumed") == expected
    pp2 = "megatron.pipeline_model_parallel_size=2"
    run("stages", 2, FP32, f"megatron.load={saved}", pp2)
    for step, loss in losses(tmp_path, "stages").items():
        assert loss == pytest.approx(expected[step], rel=1e-6)
    flows = [line["flows"] for line in metrics(tmp_path, "stages") if line["event"] == "step"]
    exchanged = [flow.get("pp.projector exchange", {}).get("wire_bytes", 0) for flow in flows]
    assert exchanged == [2 * 64 * 16 * 4, 0]  # both ranks' share of a sum, in the step that moves
    back = metrics(tmp_path, "whole")
    first = next(line for line in back if line["event"] == "step")
    assert first["boundaries"]["after_layer_1"]["error"] < 1e-4


def test_a_subspace_network_in_bf16_keeps_its_masters_in_the_subspace(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    found = run_ranks(
        train, 4, write_config(tmp_path), [*NETWORK, *TP2_PP2, SP], None, distances,
        init=False, timeout=180,
    )  # fmt: skip
    assert all(any(name.endswith(" master") for name in rank) for rank in found[:2])
    for rank in found:  # the second stage has the two layers that are free
        for name, distance in rank.items():
            if name != "free":
                assert distance < (1e-5 if " master" in name or name == "orthonormality" else 5e-3)


def turned(model: Any) -> dict[int, torch.Tensor]:
    """The projectors of this rank, and that each has moved in every step."""
    from megatron_taco.patching.boundary_chunk import ChunkBoundaries

    found = {}
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, ChunkBoundaries):
                for number, boundary in module.boundaries.items():
                    assert boundary.projector is not None
                    assert boundary.projector.steps == 4
                    found[number] = boundary.projector.a.clone()
    return found


def test_projectors_step_beside_muon(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Megatron's Muon on hidden matrices, Adam at its own rate on tables; stops and resumes."""
    pytest.importorskip("emerging_optimizers")
    config, saved = write_config(tmp_path), tmp_path / "saved"
    overrides = [
        *(*ON, "megatron.pipeline_model_parallel_size=2", "megatron.train_iters=4"),
        *("megatron.optimizer=muon", "megatron.lr=0.02", "megatron.decoupled_lr=0.01"),
        *("megatron.min_lr=0.002", "megatron.decoupled_min_lr=0.001"),
    ]
    saving = [f"megatron.save={saved}", "megatron.save_interval=2", "run.name=whole"]
    whole = run_ranks(
        train, 2, config, [*overrides, *saving], None, turned, init=False, timeout=180
    )  # fmt: skip
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    again = run_ranks(
        train, 2, config, [*overrides, f"megatron.load={saved}"], None, turned, init=False,
        timeout=180,
    )  # fmt: skip
    assert torch.equal(whole[0][1], whole[1][1])
    assert torch.equal(whole[0][1], again[0][1])
    expected = losses(tmp_path, "whole")
    assert losses(tmp_path) == {step: expected[step] for step in (3, 4)}
    assert expected[4] < expected[1]
