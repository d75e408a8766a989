"""A model of a run in one piece: what is said to be exact is, for Megatron alone or with us."""

import contextlib
import io
from pathlib import Path

import pytest

from tests.distributed.plain_megatron import train_plain
from tests.distributed.test_contracts import command_line_on_a_rank
from tests.distributed.training import OFF, losses, train, write_config
from tests.ranks import RankRunner

SECTION = "compression.pipeline_parallel"
RUN = (
    OFF,
    f"{SECTION}.mode=on",
    f"{SECTION}.rank=16",
    "megatron.bf16=false",
    "megatron.train_iters=4",
    "megatron.save_interval=3",
    "model.make_vocab_size_divisible_by=64",
    "model.untie_embeddings_and_output_weights=true",
    "model.attention=megatron",
)
PP2 = "megatron.pipeline_model_parallel_size=2"
SUBSPACE = (f"{SECTION}.boundary=subspace", f"{SECTION}.move_every=2", f"{SECTION}.move_length=0.2")
MAPL = (f"{SECTION}.after_layers=[1, 3]",)
WEIGHTS = ("megatron.no_load_optim=true", "megatron.no_load_rng=true")


def exported(rank: int, world_size: int, *arguments: str) -> tuple[int, str, str]:
    """The command's exit code and what it said, as a user runs it: in one process."""
    import os

    from megatron_taco.cli import main

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    said, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaints):
        code = main(["export", *arguments])
    return code, said.getvalue(), complaints.getvalue()


def export(run_ranks: RankRunner, *arguments: str) -> tuple[int, str, str]:
    return run_ranks(exported, 1, *arguments, init=False, timeout=120)[0]  # type: ignore[no-any-return]


def trained(
    run_ranks: RankRunner, folder: Path, ranks: int, *overrides: str
) -> tuple[str, str, list[str], float]:
    """Configuration, checkpoints and overrides of a run, and its loss just after a checkpoint."""
    config, saved = write_config(folder), str(folder / "saved")
    given = [*RUN, *overrides]
    run_ranks(train, ranks, config, [*given, f"megatron.save={saved}"], init=False, timeout=120)
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    return config, saved, given, losses(folder)[4]


def test_a_subspace_network_becomes_a_model_of_megatrons(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """Trained in two stages; Megatron without us goes on with the loss that the run had."""
    config, saved, given, loss = trained(run_ranks, tmp_path, 2, *SUBSPACE, PP2)
    output = tmp_path / "plain"
    arguments = ["--config", config, "--load", saved, "--output", str(output), "--sequences", "2"]
    code, said, _ = export(run_ranks, *arguments, "--boundaries", "fold", *given)
    assert code == 0, said
    assert "boundaries: subspace, after layers [2], rank 16 of 64, anchors static" in said
    assert "folded: exact up to rounding" in said
    assert "measured on 2 held-out sequences of 64 tokens: loss " in said
    assert "(+0.0000%)" in said or "(-0.0000%)" in said
    again, _, complaint = export(run_ranks, *arguments, *given)
    assert again == 2
    assert f"--output {output} is not empty" in complaint

    alone = [*given, f"{SECTION}.mode=off", "megatron.pipeline_model_parallel_size=1", *WEIGHTS]
    argv = run_ranks(command_line_on_a_rank, 1, config, alone, init=False)[0]
    argv = [*argv, "--load", str(output), "--exit-on-missing-checkpoint"]
    (plain,) = run_ranks(train_plain, 1, argv, "megatron", init=False, timeout=120)
    assert plain == [pytest.approx(loss, rel=1e-5)]


def test_a_projected_model_keeps_its_boundaries(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Trained in one process; exported, it goes on in other stages with the loss that it had."""
    config, saved, given, loss = trained(run_ranks, tmp_path, 1, *MAPL)
    arguments = ["--config", config, "--load", saved, "--step", "3", "--random-tokens"]
    code, said, _ = export(
        run_ranks, *arguments, "--output", str(tmp_path / "no"), "--boundaries", "fold", *given
    )
    assert code == 1
    assert "folded: not exact: a projection of rank 16 acts on the residual stream" in said
    assert "nothing written: without its boundaries it is another model" in said
    assert not (tmp_path / "no").exists()

    output = tmp_path / "kept"
    code, said, _ = export(run_ranks, *arguments, "--output", str(output), *given)
    assert code == 0
    assert f"wrote {output}, step 3: the model with its boundaries in place" in said
    assert "measured on 8 random sequences of 64 tokens: loss " in said
    layout = ["megatron.pipeline_model_parallel_layout=Et*3|tL", PP2, *WEIGHTS]
    overrides = [*given, *layout, f"megatron.load={output}", "run.name=again"]
    run_ranks(train, 2, config, overrides, init=False, timeout=120)
    assert losses(tmp_path, "again") == {4: pytest.approx(loss, rel=1e-6)}

    code, _, complaint = export(
        run_ranks, "--config", config, "--load", str(tmp_path), "--output", str(tmp_path / "no"),
        *given,
    )  # fmt: skip
    assert code == 2
    assert f"--load {tmp_path}: there is no distributed checkpoint" in complaint
