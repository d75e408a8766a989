"""The policy `auto`: measured on the run's groups, agreed by all ranks, kept and used again."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.test_contracts import output_of_failure, unhook_mappings
from tests.distributed.training import OFF, SP, losses, metrics, train, write_config
from tests.ranks import RankRunner

TP2 = "megatron.tensor_model_parallel_size=2"
AUTO = "compression.tensor_parallel.mode=auto"
BOARD = "telemetry.tensorboard=true"
MESSAGE = 64 * 2 * 64  # sequence, micro-batch, hidden size of the tiny configuration


def time_with(seconds: dict[str, float], rank: int) -> None:
    """Replace the clock by one that passes only while a measured collective runs.

    Args:
        seconds: what a ``plain`` and a ``compressed`` call take on rank 0; on rank r compressed
            calls take r + 1 times as long, so that ranks left to themselves would disagree.
        rank: this rank.
    """
    from megatron_taco.collectives import measure
    from megatron_taco.collectives.router import Router

    now = [0.0]
    plain_send, send = measure.plain_send, Router.send

    def plain(*args: Any) -> None:
        plain_send(*args)
        now[0] += seconds["plain"]

    def compressed(self: Router, *args: Any) -> Any:
        result = send(self, *args)
        now[0] += seconds["compressed"] * (rank + 1)
        return result

    measure.clock_of = lambda device: lambda: now[0]
    measure.plain_send = plain
    Router.send = compressed  # type: ignore[method-assign]


def console_to(folder: Path, name: str, rank: int) -> None:
    if rank == 0:
        sys.stdout = (folder / name).open("w", buffering=1)


def before_run(
    folder: Path, name: str, seconds: dict[str, float] | None, measured: bool, rank: int
) -> None:
    """Keep rank 0's console; inject times, or forbid measuring."""
    from megatron_taco.collectives import measure

    console_to(folder, name, rank)
    if seconds is not None:
        time_with(seconds, rank)
    if not measured:
        measure.time_pair = None  # type: ignore[assignment]


def kept_policy(model: Any) -> Any:
    """The policy that goes into checkpoints, on this rank; random state must be untouched by it."""
    from megatron.training import get_args

    return get_args().megatron_taco_policy


def attached(run: Path, name: str) -> Any:
    """What TensorBoard got of that name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors(f"megatron_taco/{name}/text_summary")
    return yaml.safe_load(text.tensor_proto.string_val[0].decode().strip("`").removeprefix("yaml"))


def text_of(path: Path) -> str:
    return " ".join(path.read_text().split())


def test_a_policy_is_measured_kept_and_used_again(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Rank 1 alone would decide otherwise; the resumed run does not measure; another TP does."""
    config = write_config(tmp_path)
    auto = [AUTO, SP, "compression.tensor_parallel.output_layer=true", "megatron.train_iters=4"]
    save = [f"megatron.save={tmp_path / 'saved'}", "megatron.save_interval=2"]
    load = f"megatron.load={tmp_path / 'saved'}"
    wins = {"plain": 4.0, "compressed": 1.5}
    start = partial(before_run, tmp_path, "first", wins, True)
    policies = run_ranks(
        train, 2, config, [TP2, BOARD, *auto, *save], start, kept_policy, init=False, timeout=120
    )
    assert policies[0] == policies[1]
    assert attached(tmp_path / "run", "policy") == policies[0]
    kept = json.loads((tmp_path / "run" / "policy.json").read_text())
    assert kept == policies[0]
    assert {(m["role"], m["collective"]) for m in kept["measured"]} == {
        (role, collective)
        for role in ("tp.forward", "tp.backward", "tp.output_layer")
        for collective in ("all_gather", "reduce_scatter")
    }
    for measured in kept["measured"]:
        assert measured["compress"]
        assert measured["nbytes"] == MESSAGE * 2
        assert measured["plain_s"] == 4.0
        assert measured["compressed_s"] == 3.0, "the slowest rank counts"
    first = text_of(tmp_path / "first")
    assert "all_gather of 16 KiB: compressed is 1.33x as fast here" in first
    assert first.count("all_gather of 16 KiB") == 1, "roles that share a measurement share a line"

    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    resume = partial(before_run, tmp_path, "second", None, False)
    run_ranks(
        train, 2, config, [TP2, *auto, load, "run.name=resumed"], resume, init=False, timeout=120
    )
    assert "policy: as in the checkpoint" in text_of(tmp_path / "second")
    unbroken, after = losses(tmp_path), losses(tmp_path, "resumed")
    assert sorted(after) == [3, 4]
    assert {step: unbroken[step] for step in after} == after

    other = partial(before_run, tmp_path, "third", None, True)
    tp4 = ["megatron.tensor_model_parallel_size=4", "run.name=wider"]
    policies = run_ranks(
        train, 4, config, [*tp4, *auto, load], other, kept_policy, init=False, timeout=120
    )
    assert all(policy == policies[0] for policy in policies)
    third = text_of(tmp_path / "third")
    assert "policy measured anew: tensor_model_parallel_size was 2, is 4, world_size was 2" in third
    assert "this run is not bit-comparable with the one it resumes" in third


def seen_sizes(model: Any) -> Any:
    """Sizes of the messages that the router of this rank met, by role and collective."""
    import gc

    from megatron_taco.collectives.router import Router

    routers = [item for item in gc.get_objects() if isinstance(item, Router)]
    assert len(routers) == 1
    return {(m.role, m.collective, m.nbytes) for m in routers[0].messages}, kept_policy(model)


def test_plain_by_policy_is_megatrons_run(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Compression wins on rank 0 alone: all ranks go plain, with the losses of compression off.

    Only measured sizes are sent in training.
    """
    config = write_config(tmp_path)
    loses = {"plain": 3.0, "compressed": 2.0}
    evaluate = ("megatron.eval_iters=1", "megatron.eval_interval=6")
    before = partial(before_run, tmp_path, "console", loses, True)
    found = run_ranks(
        train, 2, config, [TP2, AUTO, *evaluate], before, seen_sizes, init=False, timeout=120
    )
    for sizes, policy in found:
        assert not any(item["compress"] for item in policy["measured"])
        measured = {(m["role"], m["collective"], m["nbytes"]) for m in policy["measured"]}
        assert {size for size in sizes if size[0] in ("tp.forward", "tp.backward")} == measured
    run_ranks(train, 2, config, [TP2, OFF, *evaluate, "run.name=off"], init=False, timeout=120)
    assert losses(tmp_path) == losses(tmp_path, "off")
    console = text_of(tmp_path / "console")
    assert "plain is faster here: break-even at" in console
    assert "every message goes plain; training goes on uncompressed" in console
    assert "plain by policy" in console.partition("What the links carried")[2]


def test_auto_fails_on_a_role_that_never_happens(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Contract 7; that all other messages are below min_bytes is no failure under auto."""
    config = write_config(tmp_path)
    small = "compression.tensor_parallel.min_bytes=1MiB"
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 2, config, [TP2, AUTO, small], unhook_mappings, init=False, timeout=120)
    text = output_of_failure(caught.value)
    assert "role tp.forward (all_reduce) is on but was seen on no rank" in text
    assert "role tp.backward" not in text
    assert "nothing to measure: the messages are 16384 bytes, below min_bytes 1048576" in text


def time_in_groups(rank: int, world_size: int, collective: str) -> Any:
    """Time a collective in two groups of two with one slow rank; the random state, too."""
    import torch.distributed as dist

    from megatron_taco import compressors
    from megatron_taco.collectives import measure
    from megatron_taco.collectives.router import Router

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    router = Router(
        compressor=compressors.build("taco", format="e4m3", block=256),
        algorithm="auto",
        roles=frozenset({"tp.forward"}),
        min_bytes=0,
        start_step=0,
        counter=lambda role, name: pytest.fail("measuring must not count"),
    )
    time_with({"plain": 1.0 + (rank == 1), "compressed": 0.25}, rank)
    state = torch.random.get_rng_state()
    times = measure.time_pair(
        collective,
        numel=4096,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        group=groups[rank // 2],
        plain=measure.plain_send,
        compressed=router.send_checked,
    )
    assert torch.equal(state, torch.random.get_rng_state())
    return times


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_slowest_rank_of_all_groups_counts(run_ranks: RankRunner, collective: str) -> None:
    times = run_ranks(time_in_groups, 4, collective)
    assert times == [(2.0, 1.0)] * 4


def compile_for(rank: int, world_size: int, collectives: list[str]) -> Any:
    """Send each kind of message once on the ranks' own group; the router must not count."""
    import torch.distributed as dist

    from megatron_taco import compressors
    from megatron_taco.collectives.router import Router
    from megatron_taco.patching.run_facts import Messages
    from megatron_taco.patching.warm_up import compile_kernels

    router = Router(
        compressor=compressors.build("taco", format="e4m3", block=256),
        algorithm="two_shot",
        roles=frozenset({"tp.forward"}),
        min_bytes=4096,
        start_step=0,
        counter=lambda role, name: pytest.fail("what only compiles must not count"),
    )
    state = torch.random.get_rng_state()
    line = compile_kernels(
        router,
        collectives,
        Messages(training=4096, evaluation=1024, dtype=torch.bfloat16),
        dist.group.WORLD,  # type: ignore[arg-type]
        torch.device("cpu"),
        sampling=True,
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert router.messages == ()
    return re.sub("[0-9]+[.][0-9]+", "t", line)


def test_all_that_the_messages_need_is_compiled(run_ranks: RankRunner) -> None:
    """Messages below min_bytes, here the evaluation's, are not sent compressed and need nothing."""
    lines = run_ranks(compile_for, 2, ["all_reduce", "reduce_scatter"])
    parts = (
        "encode bfloat16",
        "reduce-encode of 2",
        "decode bfloat16",
        "decode float32",
        "decode-sum of 2",
    )
    assert lines == ["kernels compiled in t s: " + ", ".join(f"{part} t s" for part in parts)] * 2


def time_buckets(seconds: dict[str, float], measured: bool, rank: int) -> None:
    """Inject what a compressed bucket takes, by collective; a plain one takes 4 s.

    Where nothing is to be measured, kernels are compiled first, as on GPUs; the buckets go once.
    """
    from megatron_taco.collectives import measure
    from megatron_taco.patching import data_trial
    from megatron_taco.patching.data_policy import BucketPolicy

    now = [0.0]
    plain_send, send = measure.plain_send, BucketPolicy._send

    def plain(*args: Any) -> None:
        plain_send(*args)
        now[0] += 4.0

    def compressed(self: BucketPolicy, bucket: Any, *args: Any) -> None:
        send(self, bucket, *args)
        now[0] += seconds[bucket.collective] * (1 + rank % 2)

    measure.clock_of = lambda device: lambda: now[0]
    measure.plain_send = plain
    BucketPolicy._send = compressed  # type: ignore[method-assign]
    if not measured:
        measure.time_pair = None  # type: ignore[assignment]
        run = BucketPolicy.run

        def compiled(self: BucketPolicy) -> None:
            line = data_trial.compile_kernels(self._hooks, distributed_optimizer=True)
            assert re.fullmatch(
                "data-parallel kernels compiled in .* s, by sending [0-9]+ .*", line
            )
            assert "sending 0" not in line
            run(self)

        BucketPolicy.run = compiled  # type: ignore[method-assign]


def kept_data_policy(model: Any) -> Any:
    from megatron.training import get_args

    return get_args().megatron_taco_data_policy


def test_buckets_by_policy(run_ranks: RankRunner, tmp_path: Path) -> None:
    """PP 2 x DP 2: stages have other buckets, all ranks decide alike; resuming does not measure."""
    config = write_config(tmp_path)
    section = "compression.data_parallel"
    auto = [
        OFF,
        f"{section}.mode=auto",
        f"{section}.min_bytes=8KiB",
        f"{section}.weights.compressor=sdp4bit",
        "megatron.use_distributed_optimizer=true",
        "megatron.overlap_grad_reduce=true",
        "megatron.overlap_param_gather=true",
        "megatron.ddp_bucket_size=20000",
        "megatron.pipeline_model_parallel_size=2",
        "megatron.train_iters=4",
    ]
    save = [f"megatron.save={tmp_path / 'saved'}", "megatron.save_interval=2"]
    times = {"reduce_scatter": 1.5, "all_gather": 2.5}  # on the slower replica 3 and 5, of 4
    policies = run_ranks(
        train, 4, config, [*auto, *save, BOARD], partial(time_buckets, times, True),
        kept_data_policy, init=False, timeout=200,
    )  # fmt: skip
    assert all(policy == policies[0] for policy in policies)
    assert attached(tmp_path / "run", "data_policy") == policies[0]
    kept = json.loads((tmp_path / "run" / "data-policy.json").read_text())
    assert kept == policies[0]
    assert not (tmp_path / "run" / "policy.json").exists()
    by_role = {"dp.gradients": "reduce_scatter", "dp.weights": "all_gather"}
    assert {m["role"]: m["collective"] for m in kept["measured"]} == by_role
    for measured in kept["measured"]:
        assert measured["plain_s"] == 4.0
        assert measured["compressed_s"] == 2 * times[measured["collective"]]
        assert measured["compress"] is (measured["role"] == "dp.gradients")
        # The smallest bucket of weights fills half of its one group.
        assert measured["wire"] < (0.3 if measured["nbytes"] > 10_000 else 0.5) * measured["raw"]
    end = next(line for line in metrics(tmp_path) if line["event"] == "end")["flows"]
    gradients, weights = end["dp.gradients.mlp reduce_scatter"], end["dp.weights.mlp all_gather"]
    assert gradients["compressed"] == gradients["calls"] > 4
    assert weights["compressed"] == 0 < weights["calls"]
    assert weights["wire_bytes"] == weights["raw_bytes"]

    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    load = [f"megatron.load={tmp_path / 'saved'}", "run.name=resumed"]
    again = partial(time_buckets, times, False)
    run_ranks(train, 4, config, [*auto, *load], again, init=False, timeout=200)
    unbroken, after = losses(tmp_path), losses(tmp_path, "resumed")
    assert sorted(after) == [3, 4]
    assert {step: unbroken[step] for step in after} == after
