"""Contracts of the trainer: absent when off, loud when useless, agreed by all ranks, undone."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.plain_megatron import train_plain
from tests.distributed.training import OFF, SP, TP2_PP2, losses, metrics, train, write_config
from tests.ranks import RankRunner

TP2 = "megatron.tensor_model_parallel_size=2"


def megatron_command_line(config: str, overrides: list[str]) -> list[str]:
    """The command line that our configuration means, for a Megatron without us."""
    from megatron_taco.config import load
    from megatron_taco.training.megatron_args import megatron_argv

    return megatron_argv(load(config, overrides), device="cpu")


def command_line_on_a_rank(rank: int, world_size: int, config: str, overrides: list[str]) -> Any:
    return megatron_command_line(config, overrides)


def places(rank: int, world_size: int, config: str, overrides: list[str]) -> dict[str, bool]:
    """For each target: whether its object is the same while training runs as just before.

    Just before: after the start-up repairs, the CPU shim among them, which Megatron needs anyway.
    """
    import importlib

    from megatron_taco.patching.attributes import resolve
    from megatron_taco.patching.session import Session
    from megatron_taco.patching.targets import TARGETS

    def objects() -> dict[str, Any]:
        return {
            target.name: resolve(importlib.import_module(target.module), target.attribute).raw
            for target in TARGETS
        }

    snapshots: dict[str, dict[str, Any]] = {}
    install, undo = Session.install, Session.undo

    def install_after_look(self: Session, registry: Any) -> None:
        snapshots["before"] = objects()
        install(self, registry)

    def undo_before_look(self: Session) -> None:
        snapshots["during"] = objects()
        undo(self)
        snapshots["after"] = objects()

    Session.install, Session.undo = install_after_look, undo_before_look  # type: ignore[method-assign]
    train(rank, world_size, config, overrides)
    before, during, after = (snapshots[name] for name in ("before", "during", "after"))
    assert all(after[name] is before[name] for name in before)
    return {name: during[name] is before[name] for name in before}


@pytest.mark.parametrize(
    ("layout", "attention"),
    [(TP2_PP2, "megatron"), ((TP2,), "sdpa")],
    ids=["tp2-pp2", "tp2-torch-attention"],
)
def test_off_is_megatron_without_us(
    run_ranks: RankRunner, tmp_path: Path, layout: tuple[str, ...], attention: str
) -> None:
    """Contract 6: with compression off 20 steps' losses are Megatron's, bit for bit.

    With Megatron's own layers, and with the layers that our model provider chooses by default.
    """
    config = write_config(tmp_path)
    overrides = [*layout, OFF, f"model.attention={attention}", "megatron.train_iters=20"]
    ranks = 2 ** len(layout)
    run_ranks(train, ranks, config, overrides, init=False, timeout=120)
    ours = losses(tmp_path)
    argv = run_ranks(
        command_line_on_a_rank, 1, config, overrides, init=False, env={"WORLD_SIZE": str(ranks)}
    )[0]
    plain = run_ranks(train_plain, ranks, argv, attention, init=False, timeout=120)
    assert len(plain[-1]) == 20
    assert list(ours.values()) == plain[-1]


def test_off_replaces_nothing_and_on_is_undone(run_ranks: RankRunner, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    off = run_ranks(places, 2, config, [TP2, OFF], init=False, timeout=120)
    for untouched in off:
        replaced = {name for name, same in untouched.items() if not same}
        assert {name.split(".")[0] for name in replaced} <= {"telemetry", "startup"}
    on = run_ranks(places, 2, config, [TP2], init=False, timeout=120)
    for untouched in on:
        tensor = [same for name, same in untouched.items() if name.startswith("tensor.")]
        assert tensor
        assert not any(tensor)


def output_of_failure(error: AssertionError) -> str:
    return re.sub(r"\s+", " ", str(error))


def test_messages_all_below_min_bytes_fail_the_run(run_ranks: RankRunner, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    too_large = "compression.tensor_parallel.min_bytes=1MiB"
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 2, config, [TP2, too_large], init=False, timeout=120)
    text = output_of_failure(caught.value)
    assert "role tp.forward (all_reduce) was seen" in text
    assert "never compressed: its largest message is 16 KiB (16384 bytes), below min_bytes" in text
    assert "role tp.backward (all_reduce)" in text
    assert "exit code 1" in text
    steps = [line["iteration"] for line in metrics(tmp_path) if line["event"] == "step"]
    assert steps == [1], "the run must end with its second step, before that step is reported"


def unhook_mappings(rank: int) -> None:
    """Put the original collective back behind the registry's back, before training starts."""
    import megatron_taco.patching.session as session

    install = session.Session.install

    def install_and_lose_a_hook(self: Any, registry: Any) -> None:
        install(self, registry)
        import megatron.core.tensor_parallel.mappings as mappings

        mappings.torch = torch

    session.Session.install = install_and_lose_a_hook


def test_a_role_that_never_happens_fails_the_run(run_ranks: RankRunner, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 2, config, [TP2], unhook_mappings, init=False, timeout=120)
    text = output_of_failure(caught.value)
    assert "role tp.forward (all_reduce) is on but was seen on no rank" in text
    assert "role tp.backward" not in text


def test_start_step_postpones_only_the_check_for_compressed(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    late = [
        "compression.tensor_parallel.start_step=4",
        "megatron.train_iters=5",
        "megatron.exit_interval=4",
    ]
    too_large = "compression.tensor_parallel.min_bytes=1MiB"
    run_ranks(train, 2, config, [TP2, *late, too_large], init=False, timeout=120)
    with pytest.raises(AssertionError, match="seen on no rank"):
        run_ranks(train, 2, config, [TP2, *late], unhook_mappings, init=False, timeout=120)
    with pytest.raises(AssertionError, match="never compressed"):
        run_ranks(
            train, 2, config, [TP2, late[0], too_large, "megatron.train_iters=6"],
            init=False, timeout=120,
        )  # fmt: skip


def train_with_own_overrides(
    rank: int, world_size: int, config: str, overrides: list[str], own: list[str]
) -> None:
    train(rank, world_size, config, [*overrides, *own] if rank == 1 else overrides, None, None, 2)


def test_ranks_with_different_configurations_are_refused(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """Contract 8: all ranks leave with code 2, and rank 0 names the rank and the keys."""
    config = write_config(tmp_path)
    different = ["compression.tensor_parallel.block=128", "megatron.lr=1e-4"]
    with pytest.raises(AssertionError) as caught:
        run_ranks(
            fail_after, 2, train_with_own_overrides, (config, [TP2], different), init=False,
            timeout=60,
        )  # fmt: skip
    text = output_of_failure(caught.value)
    assert "rank 1 differs from rank 0: compression.tensor_parallel.block: 256 != 128" in text
    assert "rank 1 differs from rank 0: megatron.lr: 0.003 != 0.0001" in text
    assert "all ranks left with the expected code" in text


def fail_after(rank: int, world_size: int, fn: Any, args: tuple[Any, ...]) -> None:
    """Run ``fn`` and then fail on purpose, so that ``run_ranks`` shows what was printed."""
    fn(rank, world_size, *args)
    print("all ranks left with the expected code", file=sys.stderr, flush=True)
    raise AssertionError("shown on purpose")


def poison_a_weight(rank: int) -> None:
    """Make one weight NaN on one tensor-parallel rank once the model is built."""
    import megatron.training.training as loop

    original = loop.train

    def train_poisoned(forward_step_func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            weight = next(p for n, p in model[0].named_parameters() if "linear_fc2.weight" in n)
            with torch.no_grad():
                weight[3, 3] = float("nan")
        return original(forward_step_func, model, *args, **kwargs)

    loop.train = train_poisoned


def test_nan_reaches_megatrons_own_check(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Contract 3: a NaN on one rank arrives as NaN and Megatron's check stops the run."""
    config = write_config(tmp_path)
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 2, config, [TP2], poison_a_weight, init=False, timeout=120)
    assert "found NaN in the loss" in output_of_failure(caught.value)


def census(rank: int, world_size: int, config: str, overrides: list[str]) -> dict[Any, int]:
    """Count the collectives of a run by name, operation, dtype and number of elements."""
    import torch.distributed as dist

    counts: dict[Any, int] = {}

    def count(name: str, position: int) -> None:
        original = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position]
            op = kwargs.get("op", args[1] if name == "all_reduce" and len(args) > 1 else None)
            key = (name, str(op), str(tensor.dtype), tensor.numel())
            counts[key] = counts.get(key, 0) + 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)

    for name, position in (
        ("all_reduce", 0),
        ("broadcast", 0),
        ("all_gather_into_tensor", 1),
        ("reduce_scatter_tensor", 1),
        ("all_to_all_single", 1),
    ):
        count(name, position)
    train(rank, world_size, config, overrides)
    return counts


@pytest.mark.parametrize("layout", [(), (SP,)], ids=["tp", "sp"])
def test_what_is_never_compressed_stays_as_it_was(
    run_ranks: RankRunner, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """Contract 5: only hidden activations and their gradients change; all else is sent as before.

    The counts are of calls with FP32, BF16 and integer tensors outside of the compressed roles:
    cross entropy (MAX and SUM), norms, layer-norm gradients, tokens, flags, the data-parallel axis.
    """
    config = write_config(tmp_path)
    # Of our reporter's own sums (FP64) only the compressed run's are wider; leave those out.
    base = [TP2, *layout]
    on, off = (
        run_ranks(census, 2, config, [*base, *extra], init=False, timeout=120)
        for extra in ([], [OFF])
    )
    hidden = 64 * 2 * 64
    for rank in range(2):
        with_us = {k: n for k, n in on[rank].items() if k[2] != "torch.float64"}
        without = {k: n for k, n in off[rank].items() if k[2] != "torch.float64"}
        payloads = {key for key in with_us if key[2] == "torch.uint8"}
        assert payloads
        changed = {
            key
            for key in with_us.keys() | without.keys()
            if with_us.get(key, 0) != without.get(key, 0)
        }
        activations = {
            key
            for key in changed - payloads
            if key[2] == "torch.bfloat16" and key[3] in (hidden, hidden // 2)
        }
        assert changed == payloads | activations
        assert all(with_us.get(key, 0) < without[key] for key in activations)
        assert any("MAX" in key[1] for key in with_us)


def kill_rank_three(rank: int) -> None:
    """End rank 3 as the kernel's out-of-memory killer would, in its third step."""
    import signal

    import megatron_taco.training.step as step

    original = step.forward_step
    done = [0]

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        done[0] += 1
        if rank == 3 and done[0] == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    step.forward_step = forward_step


def test_a_killed_rank_ends_the_others_with_a_message(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 4, config, [*TP2_PP2], kill_rank_three, init=False, timeout=120)
    text = output_of_failure(caught.value)
    assert "rank 3 died with exit code -9" in text
    assert "killed (timeout)" not in text
    for rank in range(3):
        assert f"rank {rank}: lost contact with another rank" in text or (
            f"rank {rank} still running" in text
        )
    assert "lost contact with another rank" in text
