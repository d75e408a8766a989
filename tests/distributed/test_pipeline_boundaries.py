"""Pipeline boundaries in training: cut or in place, in every layout, the same numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import OFF, SP, losses, metrics, train, write_config
from tests.ranks import RankRunner

ON = (
    OFF,
    "compression.pipeline_parallel.mode=on",
    "compression.pipeline_parallel.rank=16",
    "compression.pipeline_parallel.check_every=1",
    "megatron.bf16=false",
    "model.make_vocab_size_divisible_by=64",
)
DEPTHS = "compression.pipeline_parallel.after_layers=[1, 2, 3]"
PP2 = "megatron.pipeline_model_parallel_size=2"
PP4 = "megatron.pipeline_model_parallel_size=4"
VP2 = "megatron.num_layers_per_virtual_pipeline_stage=1"
TP2 = "megatron.tensor_model_parallel_size=2"
PER_TOKEN = "megatron.calculate_per_token_loss=true"
SMALL = "megatron.micro_batch_size=1"
RECOMPUTE = (
    "megatron.recompute_granularity=full",
    "megatron.recompute_method=uniform",
    "megatron.recompute_num_layers=2",
)
LAST = 7


GRADIENTS: dict[int, torch.Tensor] = {}
"""Of the first step in this process, which is a rank's own."""


@dataclass
class Held:
    """What a rank holds at the end: projectors, and their gradients of its first step."""

    projectors: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]


def record_gradients(rank: int) -> None:
    """Keep the gradients of the first step: SPEL's own steps do not depend on their scale."""
    from megatron_taco.patching import pipeline

    original = pipeline.whole_gradients

    def whole_gradients(*args: Any) -> dict[int, torch.Tensor]:
        found = original(*args)
        if not GRADIENTS:
            GRADIENTS.update({number: each.clone() for number, each in found.items()})
        return found

    pipeline.whole_gradients = whole_gradients


def held(model: Any) -> Held:
    """What this rank holds, by the number of the boundary."""
    from megatron_taco.patching.boundary_chunk import ChunkBoundaries

    found = {}
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, ChunkBoundaries):
                for number, boundary in module.boundaries.items():
                    assert boundary.projector is not None
                    found[number] = boundary.projector.a.clone()
    return Held(found, GRADIENTS)


class Reference:
    """A run in one process with boundaries in place, and its checkpoint after step 2."""

    def __init__(self, run_ranks: RankRunner, folder: Path) -> None:
        self._run_ranks, self._folder = run_ranks, folder
        self._config = write_config(folder)
        save = (f"megatron.save={folder / 'saved'}", "megatron.save_interval=2")
        self.projectors = self._train(1, "whole", save)[0].projectors
        self.losses = self._after(2, "whole")
        self.resumed, (self.held,) = self.resume(1, "resumed")

    def _train(self, ranks: int, name: str, overrides: tuple[str, ...]) -> list[Held]:
        end = f"megatron.train_iters={LAST}"
        overrides = (*ON, DEPTHS, end, f"run.name={name}", *overrides)
        return self._run_ranks(
            train,
            ranks,
            self._config,
            list(overrides),
            record_gradients,
            held,
            init=False,
            timeout=180,
        )

    def _after(self, step: int, name: str) -> dict[int, float]:
        return {at: loss for at, loss in losses(self._folder, name).items() if at > step}

    def resume(self, ranks: int, name: str, *overrides: str) -> tuple[dict[int, float], list[Held]]:
        """Go on from the checkpoint with other overrides: losses, and what each rank holds."""
        (self._folder / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
        load = f"megatron.load={self._folder / 'saved'}"
        found = self._train(ranks, name, (load, *overrides))
        return self._after(2, name), found


@pytest.fixture(scope="module")
def reference(run_ranks: RankRunner, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(run_ranks, tmp_path_factory.mktemp("boundaries"))


def test_resuming_in_place_changes_no_bit(reference: Reference) -> None:
    assert reference.resumed == reference.losses
    resumed = reference.held.projectors
    assert all(torch.equal(a, resumed[n]) for n, a in reference.projectors.items())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(4, (PP4,)), (2, (PP2, *RECOMPUTE)), (2, (PP2, VP2))],
    ids=["pp4", "pp2-recompute", "pp2-vp2"],
)
def test_stages_compute_what_one_process_computes(
    reference: Reference, ranks: int, layout: tuple[str, ...]
) -> None:
    """A checkpoint of one process goes on in stages, with the same losses and projectors."""
    after, found = reference.resume(ranks, f"stages{ranks}{len(layout)}", *layout)
    for step, loss in reference.losses.items():
        assert after[step] == pytest.approx(loss, rel=1e-6)
    copies: dict[int, list[torch.Tensor]] = {}
    for rank in found:
        for number, a in rank.projectors.items():
            copies.setdefault(number, []).append(a)
    assert sorted(copies) == [1, 2, 3]
    for number, same in copies.items():
        assert all(torch.equal(a, same[0]) for a in same)
        torch.testing.assert_close(same[0], reference.projectors[number], rtol=0, atol=1e-6)
    assert any(len(same) == 2 for same in copies.values())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, (TP2, SP, PP2)),
        (4, (PP2, SMALL, PER_TOKEN)),
        (4, (TP2, SP, SMALL, PER_TOKEN)),
        (2, (TP2,)),
    ],
    ids=["tp2-sp-pp2", "pp2-dp2-per-token", "tp2-sp-dp2-per-token", "tp2"],
)
def test_every_layout_has_the_same_gradient_of_the_projector(
    reference: Reference, ranks: int, layout: tuple[str, ...]
) -> None:
    """Sums over TP under SP, over DP, and both scalings: the same A after five more steps."""
    after, found = reference.resume(ranks, f"layout{ranks}{len(layout)}{layout[-1][-9:]}", *layout)
    for step, loss in reference.losses.items():
        assert after[step] == pytest.approx(loss, rel=1e-4)
    for rank in found:
        for number, a in rank.projectors.items():
            torch.testing.assert_close(a, reference.projectors[number], rtol=0, atol=2e-5)
        assert rank.gradients.keys() == rank.projectors.keys()
        for number, gradient in rank.gradients.items():
            expected = reference.held.gradients[number]
            assert (gradient - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("changed", "messages"),
    [
        (
            ["after_layers=[1, 2]"],
            [
                "after_layers: [1, 2], but the checkpoint of megatron.load has boundaries after "
                "layers [1, 2, 3]"
            ],
        ),
        (
            ["anchors=none", "rank=8", "seed=5", "quantizer.forward.kind=rvq"],
            [
                "compression.pipeline_parallel.anchors: 'none', but the checkpoint of "
                "megatron.load has 'factorised'; ",
                "rank: 8, but the checkpoint of megatron.load has 16; ",
                "quantizer.forward.kind: 'rvq', but the checkpoint of megatron.load has 'none'; ",
                "seed: 5, but the checkpoint of megatron.load has 1234; a boundary is part of the",
            ],
        ),
        (
            ["mode=off"],
            ["mode: off, but the checkpoint of megatron.load has boundaries after layers"],
        ),
    ],
)
def test_a_model_with_other_boundaries_is_refused(
    reference: Reference, changed: list[str], messages: list[str]
) -> None:
    overrides = [f"compression.pipeline_parallel.{each}" for each in changed]
    with pytest.raises(AssertionError, match="exit code 2") as failure:
        reference.resume(1, f"other-{changed[0][:4]}", *overrides)
    assert all(message in str(failure.value) for message in messages)


def test_boundaries_without_tensors_are_known_by_their_settings(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """A checkpoint of a boundary that learns nothing resumes, and not without it."""
    config = write_config(tmp_path)
    axis = "compression.pipeline_parallel"
    common = [OFF, f"{axis}.mode=on", f"{axis}.boundary=int8_hadamard", "megatron.train_iters=3"]
    save = [f"megatron.save={tmp_path / 'saved'}", "megatron.save_interval=2"]
    run_ranks(train, 2, config, [*common, PP2, *save], init=False, timeout=150)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    resume = [*common, f"megatron.load={tmp_path / 'saved'}", "run.name=resumed"]
    run_ranks(train, 2, config, [*resume, PP2], init=False, timeout=150)
    assert losses(tmp_path, "resumed") == {3: losses(tmp_path)[3]}
    with pytest.raises(AssertionError, match="exit code 2") as failure:
        run_ranks(train, 1, config, [*resume, f"{axis}.mode=off"], init=False, timeout=150)
    assert "has boundaries after layers [2]" in str(failure.value)


def test_a_square_projector_is_no_boundary(run_ranks: RankRunner, tmp_path: Path) -> None:
    """With r = d and no anchors step 1 has the loss of the model without boundaries."""
    config = write_config(tmp_path)
    common = [*ON, PP2, "megatron.train_iters=1"]
    square = [
        "compression.pipeline_parallel.rank=64",
        "compression.pipeline_parallel.anchors=none",
    ]
    for name, extra in (("square", square), ("none", ["compression.pipeline_parallel.mode=off"])):
        overrides = [*common, *extra, f"run.name={name}"]
        run_ranks(train, 2, config, overrides, init=False, timeout=60)
    assert losses(tmp_path, "square")[1] == pytest.approx(losses(tmp_path, "none")[1], rel=1e-5)


def vary_lengths(rank: int) -> None:
    """Have Megatron send shapes first, as models with varying lengths do."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original = P2PCommunicator.__init__

    def __init__(self: Any, pp_group: Any, config: Any) -> None:
        config.variable_seq_lengths = True
        original(self, pp_group, config)

    P2PCommunicator.__init__ = __init__


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    """All tensors of this rank's boundaries: projectors, momenta, codebooks and their counts."""
    from megatron_taco.patching.boundary_chunk import ChunkBoundaries

    chunks = [m for c in model for m in c.modules() if isinstance(m, ChunkBoundaries)]
    return {
        name: value.clone()
        for chunk in chunks
        for name, value in chunk.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def test_quantised_messages_shapes_first_evaluation_and_resume(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """RVQ after its warm-up and INT8 back; evaluation has other micro-batches and adds no state.

    A resumed run changes no bit, codebooks included.
    """
    config = write_config(tmp_path)
    rvq = "compression.pipeline_parallel.quantizer.forward"
    overrides = [
        *ON,
        PP2,
        *(f"{rvq}.kind=rvq", f"{rvq}.warmup_steps=2", f"{rvq}.codes=16", f"{rvq}.rounds=2"),
        *(f"{rvq}.sample=64", "compression.pipeline_parallel.quantizer.backward.kind=int8"),
        "megatron.train_iters=5",
    ]
    evaluation = [
        *("megatron.eval_iters=1", "megatron.eval_interval=2"),
        *("megatron.eval_micro_batch_size=1", "megatron.eval_global_batch_size=4"),
    ]
    saved = tmp_path / "saved"
    save = ["run.name=plain", f"megatron.save={saved}", "megatron.save_interval=3"]
    plain = run_ranks(
        train, 2, config, [*overrides, *save], None, whole_state, init=False, timeout=90
    )  # fmt: skip
    run_ranks(
        train, 2, config, [*overrides, *evaluation], vary_lengths, init=False, timeout=90
    )  # fmt: skip
    assert losses(tmp_path) == losses(tmp_path, "plain")
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    load = ["run.name=resumed", f"megatron.load={saved}"]
    resumed = run_ranks(
        train, 2, config, [*overrides, *load], None, whole_state, init=False, timeout=90
    )  # fmt: skip
    for whole, again in zip(plain, resumed, strict=True):
        assert whole.keys() == again.keys()
        assert all(torch.equal(value, again[name]) for name, value in whole.items())
    kept = {name.rsplit(".", 1)[-1] for name in plain[0]}
    assert {"a", "momentum", "table", "counts", "sums"} <= kept
    steps = [line for line in metrics(tmp_path, "plain") if line["event"] == "step"]
    sent = [line["flows"]["pp.forward send"] for line in steps]
    ids = 4 * 2 * 64 * 2  # micro-batches, sequences, positions, bytes
    assert sent[0]["raw_bytes"] == 4 * 64 * 2 * 64 * 4
    assert sent[0]["wire_bytes"] == 4 * 64 * 2 * 16 * 4 + ids
    assert sent[4]["wire_bytes"] < sent[0]["wire_bytes"] / 4
    back = steps[0]["flows"]["pp.backward send"]
    assert back["wire_bytes"] < back["raw_bytes"] / 12
    assert steps[0]["flows"]["pp.projector exchange"]["raw_bytes"] == 2 * 64 * 16 * 4
    assert steps[4]["boundaries"]["after_layer_2"]["orthonormality"] < 1e-5
    # Sampled in the first step: a quarter of the coordinates of a random vector, then INT8 back.
    error = steps[0]["boundaries"]["after_layer_2"]["error"]
    assert 0.7 < error < 0.95
    assert sent[0]["error"] == pytest.approx(error)
    assert 0.003 < back["error"] < 0.02
    assert "error" not in steps[4]["boundaries"]["after_layer_2"]


def steps_made(model: Any) -> list[int]:
    """How often each projector of this rank has moved."""
    from megatron_taco.boundaries import Projector

    return [m.steps for chunk in model for m in chunk.modules() if isinstance(m, Projector)]


def test_a_skipped_step_moves_no_projector(run_ranks: RankRunner, tmp_path: Path) -> None:
    """FP16 whose first losses overflow: projectors move as often as the optimiser stepped.

    The loss scale is halved once a skipped step, the first one excepted (Megatron's hysteresis).
    """
    config = write_config(tmp_path)
    # High enough that the projectors' gradients overflow as well, at first.
    scale = 28
    fp16 = ["megatron.fp16=true", f"megatron.initial_loss_scale={2**scale}"]
    fp16 += ["megatron.train_iters=16"]
    made = run_ranks(
        train, 2, config, [*ON, PP2, *fp16], None, steps_made, init=False, timeout=90
    )  # fmt: skip
    steps = [line for line in metrics(tmp_path) if line["event"] == "step"]
    skipped = [line["skipped"] for line in steps]
    assert 1 < sum(skipped) < len(skipped)
    assert steps[-1]["loss_scale"] == 2 ** (scale - (sum(skipped) - 1))
    assert made == [[len(skipped) - sum(skipped)]] * 2


def call_layers_by_their_forward(rank: int) -> None:
    """Have layers run without their hooks, as a schedule of parts of them does."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    TransformerLayer.__call__ = __call__


def test_a_boundary_that_is_never_passed_fails_the_run(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """Of three the middle one is cut and is passed; the others would be in place."""
    with pytest.raises(AssertionError) as failure:
        run_ranks(
            train,
            2,
            write_config(tmp_path),
            [*ON, DEPTHS, PP2],
            call_layers_by_their_forward,
            init=False,
            timeout=90,
        )
    assert "the boundaries after layers [1, 3] are on and no training step" in str(failure.value)
    assert len(losses(tmp_path)) <= 2
