"""Tests of the run_ranks fixture itself: a fixture that hides a failure would hide them all."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankRunner


def _sum(rank: int, world_size: int, start: int) -> tuple[torch.Tensor, int]:
    weight = torch.full((3,), float(rank + start), requires_grad=True)
    (weight * weight).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    return gradient, torch.get_num_threads()


def test_results_come_back_by_rank(run_ranks: RankRunner) -> None:
    """A collective and autograd work in the forked ranks, and one call does not mark the next."""
    for world_size in (1, 3, 2):
        results = run_ranks(_sum, world_size, 10)
        assert len(results) == world_size
        expected = 2.0 * sum(range(10, 10 + world_size))
        assert all(torch.equal(g, torch.full((3,), expected)) for g, _ in results)
        assert all(threads == 1 for _, threads in results)


def _fails_on_rank_1(rank: int, world_size: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        raise KeyError("the wheel of fortune")
    dist.barrier()


def test_a_failure_names_the_rank(run_ranks: RankRunner) -> None:
    """The rank, its traceback and its output are in the message; the others do not hang."""
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(_fails_on_rank_1, 3)
    text = str(caught.value)
    assert time.monotonic() - start < 15
    assert "--- rank 1 raised" in text
    assert "the wheel of fortune" in text
    assert "_fails_on_rank_1" in text
    assert "rank 1 was here" in text


def _hangs(rank: int, world_size: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(f"pids {os.getpid()} {child.pid}", flush=True)
    if rank == 0:
        time.sleep(1000)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_timeout_kills_everything(run_ranks: RankRunner) -> None:
    """No rank, and no process that a rank started, outlives the call; the stack is shown."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(_hangs, 2, timeout=2, init=False, preload="torch")
    text = str(caught.value)
    assert "--- rank 0 still running" in text
    assert "(timeout)" in text
    assert "in _hangs" in text  # the stack of the sleeping rank
    pids = [
        int(p) for line in text.splitlines() if line.startswith("pids") for p in line.split()[1:]
    ]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _dies(rank: int, world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_a_failure(run_ranks: RankRunner) -> None:
    """A rank that ends without a word has not passed."""
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(_dies, 1)


def _environment(rank: int, world_size: int) -> tuple[str, ...]:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.tensor([rank])
    dist.all_reduce(value)
    assert int(value) == sum(range(world_size))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "A_SETTING", "ANOTHER")
    return (*(os.environ[name] for name in names), os.getcwd())


def test_environment_as_torchrun_sets_it(
    run_ranks: RankRunner, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With init=False a rank finds what it needs to make the process group itself."""
    monkeypatch.setenv("ANOTHER", "of the test")
    results = run_ranks(
        _environment, 2, env={"A_SETTING": "x"}, init=False, cwd=tmp_path, preload="torch"
    )
    folder = os.fspath(tmp_path)
    assert results == [
        ("0", "0", "2", "2", "x", "of the test", folder),
        ("1", "1", "2", "2", "x", "of the test", folder),
    ]


def _megatron(rank: int, world_size: int) -> float:
    assert "megatron.training" in sys.modules
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    value = torch.ones(1)
    dist.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
    return float(value)


def test_megatron_is_loaded_where_asked(run_ranks: RankRunner) -> None:
    """init=False ranks find Megatron imported, and its process groups work in them."""
    assert run_ranks(_megatron, 2, init=False) == [2.0, 2.0]


def test_only_module_level_functions(run_ranks: RankRunner) -> None:
    """A function that cannot be found by name is refused before anything starts."""
    with pytest.raises(TypeError, match="module-level"):
        run_ranks(lambda rank, world_size: None, 1)
