"""Ranks forked from a process that has imported Megatron, and how they end."""

import os
import sys
import time
from pathlib import Path

import pytest

from megatron_taco.lab.forked import Forked


def imported(codes: list[int]) -> int:
    """Say who this rank is; end with its code."""
    rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    print(f"rank {rank} of {size}, trainer {'megatron.training.training' in sys.modules}")
    return codes[rank]


def wait(folder: Path) -> int:
    """Never end; say that it runs."""
    (folder / os.environ["RANK"]).touch()
    time.sleep(600)
    return 0


def fail_first(folder: Path) -> int:
    """Rank 1 fails once rank 0 runs, which never ends."""
    if os.environ["RANK"] == "0":
        return wait(folder)
    while not (folder / "0").exists():
        time.sleep(0.01)
    return 3


@pytest.fixture(scope="module")
def forked() -> Forked:
    return Forked(cpu=True)


def test_ranks_give_their_exit_codes(forked: Forked, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked.run(imported, ([0, 0],), ranks=2, log=log, timeout_s=120) == [0, 0]
    for rank in range(2):
        text = Path(f"{log}.{rank}").read_text()
        assert f"rank {rank} of 2, trainer True" in text


def test_no_rank_outlives_a_failed_one_or_the_time(forked: Forked, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked.run(fail_first, (tmp_path,), ranks=2, log=log, timeout_s=120) == [-15, 3]
    assert forked.run(wait, (tmp_path,), ranks=2, log=log, timeout_s=1) == [-15, -15]
