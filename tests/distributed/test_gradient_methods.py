"""Gradient methods with memory in the trainer: replicas, resuming, sizes, what is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_data_parallel import (
    DP,
    OVERLAP,
    OVERLAP_BOTH,
    digests,
    flows,
    near,
    run,
)
from tests.distributed.training import (
    DISTRIBUTED_OPTIMIZER,
    OFF,
    losses,
    metrics,
    train,
    write_config,
)
from tests.ranks import RankRunner

ON = (OFF, f"{DP}.mode=on", f"{DP}.min_bytes=1KiB")
SMALL_BUCKETS = "megatron.ddp_bucket_size=20000"
STEPS = 4
METHODS: dict[str, tuple[str, ...]] = {
    "powersgd": ("rank=8",),
    "topk": ("ratio=0.1",),
    "tagc": ("ratio=0.1",),
    "pactrain": ("ternary=true",),
    "homomorphic": (),
    "cd_adam": ("bits=8",),
}


def method(name: str, *more: str) -> tuple[str, ...]:
    given = (f"compressor={name}", *METHODS[name], *more)
    return (*ON, f"megatron.train_iters={STEPS}", *(f"{DP}.gradients.{text}" for text in given))


def save_half(run_ranks: RankRunner, ranks: int, config: str, folder: Path, *common: str) -> None:
    """The first half of the run called ``parts``, saved."""
    save = (f"megatron.save={folder}", "megatron.save_interval=2", "megatron.exit_interval=2")
    arguments = [*common, *save, "run.name=parts"]
    run_ranks(train, ranks, config, arguments, init=False, timeout=150)


def saving(folder: Path) -> tuple[str, ...]:
    """A whole run that leaves a checkpoint of its half as well."""
    return (f"megatron.save={folder}", "megatron.save_interval=2")


def loading(folder: Path) -> tuple[str, ...]:
    return (f"megatron.load={folder}", "megatron.ckpt_step=2")


def last_steps(found: dict[int, float]) -> dict[int, float]:
    """The losses after the checkpoint."""
    return {step: loss for step, loss in found.items() if step > 2}


@pytest.mark.parametrize("name", ["powersgd", "cd_adam"])
def test_resuming_changes_no_bit(run_ranks: RankRunner, tmp_path: Path, name: str) -> None:
    """Memory by parameter and by bucket, of one rank and of all; several buckets, overlap."""
    config = write_config(tmp_path)
    layout = OVERLAP if name == "cd_adam" else (DISTRIBUTED_OPTIMIZER, *OVERLAP_BOTH)
    common = (*method(name), *layout, SMALL_BUCKETS)
    whole = run(run_ranks, 2, config, "whole", *common)
    save_half(run_ranks, 2, config, tmp_path / "saved", *common)
    load = f"megatron.load={tmp_path / 'saved'}"
    resumed = run(run_ranks, 2, config, "parts", *common, load)
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    assert resumed == whole
    collective = "all_reduce" if name == "cd_adam" else "reduce_scatter"
    counted = flows(tmp_path, "whole")
    assert counted[f"dp.gradients.{name} {collective}"]["compressed"] > STEPS * 2 * 2
    assert counted[f"dp.gradients.norm {collective}"]["compressed"] == 0
    if name != "powersgd":
        return
    lines = metrics(tmp_path, "whole")
    (cost,) = next(line for line in lines if line["event"] == "end")["costs"].values()
    assert cost["state_bytes"] > 4 * 100_000  # a residual for every element of the matrices
    # It is the memory that makes it so: without it the run goes on otherwise.
    fresh = (*method(name, "memory=fresh"), *layout, SMALL_BUCKETS, "run.name=fresh", load)
    run_ranks(train, 2, config, list(fresh), init=False, timeout=150)
    assert losses(tmp_path, "fresh")[3] == losses(tmp_path, "whole")[3]
    assert losses(tmp_path, "fresh")[4] != losses(tmp_path, "whole")[4]
    for ranks, change, message in (
        (4, "run.name=four", "data parallel 2 and this run has tensor parallel 1 x pipeline"),
        (2, f"{DP}.min_bytes=1GiB", "is of the bucket 0:module."),
    ):
        with pytest.raises(AssertionError, match="exit code 2") as caught:
            run_ranks(
                train, ranks, config, [*common, load, "run.name=refused", change],
                init=False, timeout=150,
            )  # fmt: skip
        assert message in " ".join(str(caught.value).split())


@pytest.fixture(scope="module")
def reference(run_ranks: RankRunner, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the uncompressed run."""
    folder = tmp_path_factory.mktemp("reference")
    run(run_ranks, 2, write_config(folder), "off", OFF, f"megatron.train_iters={STEPS}")
    return losses(folder, "off")


@pytest.mark.parametrize(
    ("name", "bound"), [("homomorphic", 1e-3), ("topk", 0.12), ("tagc", 0.12), ("pactrain", 0.1)]
)
def test_follows_the_uncompressed_run_and_resumes(
    run_ranks: RankRunner, tmp_path: Path, reference: dict[int, float], name: str, bound: float
) -> None:
    """Homomorphic sums are lossless; sparse ones lag by what their residuals still hold.

    Without residuals a checkpoint goes on at another size as well.
    """
    config = write_config(tmp_path)
    arm, load = method(name), loading(tmp_path / "saved")
    whole = run(run_ranks, 2, config, "whole", *arm, *saving(tmp_path / "saved"))
    found = losses(tmp_path, "whole")
    assert near(found, reference, bound)
    sent = flows(tmp_path, "whole")[f"dp.gradients.{name} all_reduce"]
    assert sent["compressed"] == sent["calls"] == STEPS * 2
    assert (sent["wire_bytes"] < 0.5 * sent["raw_bytes"]) is (name != "homomorphic")
    assert run(run_ranks, 2, config, "resumed", *arm, *load) == whole
    assert losses(tmp_path, "resumed") == last_steps(found)
    if name in ("homomorphic", "pactrain"):
        run(run_ranks, 4, config, "four", *arm, *load)
        assert near(losses(tmp_path, "four"), last_steps(reference), bound)


def test_average_in_bf16_with_tensor_parallelism(run_ranks: RankRunner, tmp_path: Path) -> None:
    """TP 2 x DP 2, BF16 sums averaged in the collective, and a plain step first.

    What the ranks share is of the TP rank's parameters, so it is refused at another TP size.
    """
    config = write_config(tmp_path)
    base = (
        "megatron.tensor_model_parallel_size=2",
        "megatron.ddp_average_in_collective=true",
        "megatron.grad_reduce_in_bf16=true",
        f"megatron.train_iters={STEPS}",
    )
    run_ranks(train, 4, config, [OFF, *base, "run.name=off"], init=False, timeout=200)
    pactrain = (*method("pactrain"), *base, f"{DP}.start_step=1")
    arguments = [*pactrain, *saving(tmp_path / "saved"), "run.name=on"]
    found: list[dict[str, str]] = run_ranks(
        train, 4, config, arguments, None, digests, init=False, timeout=200
    )
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert all(found[0][name] == found[1][name] for name in found[0] if "norm" in name)
    on, off = losses(tmp_path, "on"), losses(tmp_path, "off")
    assert (on[1], on[2]) == (off[1], off[2])
    assert on[STEPS] != off[STEPS]
    assert near(on, off, 0.1)
    sent = flows(tmp_path, "on")["dp.gradients.pactrain all_reduce"]
    assert sent["compressed"] == sent["calls"] * (STEPS - 1) / STEPS
    one = [*pactrain, *loading(tmp_path / "saved"), "megatron.tensor_model_parallel_size=1"]
    with pytest.raises(AssertionError, match="exit code 2") as caught:
        run_ranks(train, 4, config, [*one, "run.name=one"], init=False, timeout=200)
    message = "data parallel 4: it is of the part of the model that a rank holds"
    assert message in " ".join(str(caught.value).split())
