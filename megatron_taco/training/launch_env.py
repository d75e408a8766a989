"""Who this process is among the ranks, from torchrun's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place in the run."""

    rank: int
    local_rank: int
    world_size: int


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started_by_launcher() -> bool:
    """Whether torchrun (or another launcher that sets its variables) started this process."""
    return "RANK" in os.environ


def ranks_from_environment() -> Ranks:
    """Read torchrun's variables; without torchrun this is a run of one process."""
    if not started_by_launcher():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    return Ranks(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
