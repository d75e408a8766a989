"""Starts the ranks of a run on this machine, waits for them, and leaves none behind.

Every rank leads a session of its own, so that what it starts can be killed with it. When a rank
fails the others get some seconds to notice and end by themselves. A signal to the launcher is
passed on to the ranks. Should the launcher itself be killed, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_taco.lab import namespaces
from megatron_taco.lab.signals import Caught

_ENTER: Final = Path(__file__).with_name("enter.py")
_POLL_S: Final = 0.05
AFTER_FAILURE_S: Final = 15.0
"""How long the other ranks may go on once one has failed."""
AFTER_SIGNAL_S: Final = 5.0
"""How long the ranks may take to end once they were told to."""
TIMED_OUT: Final = 124


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank runs.

    Attributes:
        environment: Variables that differ from the launcher's.
        netns: Name of the network namespace, None for the launcher's own.
    """

    environment: Mapping[str, str]
    netns: str | None = None


def command_line(words: Sequence[str]) -> list[str]:
    """Returns the command that a user means by some words.

    Options (``-m module``) and ``.py`` files are for this Python; all else is a program.
    """
    if words[0].startswith("-") or words[0].endswith(".py"):
        return [sys.executable, *words]
    return list(words)


def launch(
    command: Sequence[str],
    places: Sequence[Place],
    *,
    timeout_s: float | None = None,
    caught: Caught | None = None,
) -> int:
    """Runs ``command`` once in each place; place r is rank r.

    Args:
        command: Program and arguments.
        places: One for each rank.
        timeout_s: Seconds after which all ranks are killed.
        caught: Signals that have been caught since before; by default they are from here on.

    Returns:
        0 when all ranks returned 0; else the exit code of the first that failed (128 + the signal
        for a killed one), 124 after the timeout, 128 + the signal if this process was told to end.
    """
    if caught is None:
        with Caught() as caught:
            return launch(command, places, timeout_s=timeout_s, caught=caught)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for place in places:
            if caught.first is None:
                processes.append(_start(command, place))
        return _wait(processes, timeout_s, caught)
    finally:
        for process in processes:
            _kill_group(process.pid, signal.SIGKILL)
            process.wait()


def _start(command: Sequence[str], place: Place) -> subprocess.Popen[bytes]:
    netns = "-" if place.netns is None else str(namespaces.FOLDER / place.netns)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_ENTER), str(os.getpid()), netns, *command],
        env={**os.environ, **place.environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None, caught: Caught
) -> int:
    """Waits for the ranks, or until it is time to kill those that are left; the exit code."""
    codes: dict[int, int] = {}
    code: int | None = None
    passed_on = 0
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while True:
        for rank, process in enumerate(processes):
            ended = None if rank in codes else _exit_code(process.pid)
            if ended is None:
                continue
            codes[rank] = ended
            if ended and code is None:
                code = ended
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
                _say(f"rank {rank} (process {process.pid}) {_how(ended)}")
        if len(codes) == len(processes):
            break
        if caught.first is not None and caught.count > passed_on:
            if passed_on == 0:
                code = caught.exit_code
                deadline = min(deadline, time.monotonic() + AFTER_SIGNAL_S)
                number: signal.Signals = caught.first
                _say(f"{number.name}: told the ranks to end")
            else:
                number = signal.SIGKILL  # a second Ctrl-C
            passed_on = caught.count
            for process in processes:
                _kill_group(process.pid, number)
        if time.monotonic() > deadline:
            left = [rank for rank in range(len(processes)) if rank not in codes]
            _say(f"killed rank {', '.join(map(str, left))}: still running")
            code = TIMED_OUT if code is None else code
            break
        time.sleep(_POLL_S)
    return (code if caught.exit_code is None else caught.exit_code) or 0


def _exit_code(pid: int) -> int | None:
    """The exit code of an ended rank, None while it runs.

    The process stays a zombie, so that its id still names its group when that is killed.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _how(code: int) -> str:
    if code > 128 and code - 128 in set(signal.Signals):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"failed with exit code {code}"


def _say(text: str) -> None:
    print(f"megatron-taco: {text}", file=sys.stderr, flush=True)
