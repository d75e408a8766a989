"""Training runs in processes forked from one that has imported Megatron, which takes seconds.

That process imports and computes nothing, so that forking it is safe, on machines with GPUs too.
The caller is a script that starts nothing unless it is ``__main__``.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from megatron_taco.lab.places import free_port

_PRELOAD: Final = (
    "torch.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing",
    "megatron.core.tokenizers.text",
    "megatron.training.training",
    "megatron_taco.patching.session",
    "megatron_taco.training.run",
)
_END_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1


class Forked:
    """Starts ranks; made once in a process, before it touches a GPU.

    Args:
        cpu: Whether the runs are on CPUs: one thread each, and nothing is compiled.
    """

    def __init__(self, *, cpu: bool) -> None:
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of what Megatron's import misses
        if cpu:
            os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))

    def run(
        self,
        main: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        ranks: int,
        log: Path,
        timeout_s: float | None,
    ) -> list[int | None]:
        """Call ``main(*arguments)`` in each rank, with the variables that torchrun sets.

        At the time-out, and where this process is interrupted, the ranks are told to end (SIGTERM)
        and waited for; then killed.

        Args:
            main: A function at the top of its module; what it returns is the exit code.
            arguments: Its arguments.
            ranks: How many.
            log: File that gets their output; rank R's is ``log`` with ``.R`` appended.
            timeout_s: Seconds; None waits.

        Returns:
            The exit codes, by rank; negative for a signal.
        """
        port = free_port()
        processes = [
            self._context.Process(target=_rank, args=(rank, ranks, port, log, main, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.terminate()
            _wait(processes, _END_S)
            for process in processes:
                process.kill()
                process.join()
        return [process.exitcode for process in processes]


def _wait(processes: Sequence[ForkServerProcess], timeout_s: float | None) -> None:
    """Wait until all have ended, one has failed, or the time is over."""
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def _rank(
    rank: int, ranks: int, port: int, log: Path, main: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    if sys.platform.startswith("linux"):  # the server ends with the script, however that ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    file = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(main(*arguments))
