"""Runs the command of a part: to its end, its time limit, a signal, or the end of another node's.

Benchmarks end their ranks and remove their links themselves, so they are told to and given time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from megatron_taco.lab.signals import Caught

TIMEOUT_S: Final = 540.0
TIMED_OUT: Final = 124
_END_S: Final = 30.0
_POLL_S: Final = 0.1


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    caught: Caught,
    stopped: Callable[[], str | None] = lambda: None,
    timeout_s: float = TIMEOUT_S,
    quiet: bool = False,
) -> tuple[int, str]:
    """Runs Python with a command.

    Args:
        command: Arguments of Python.
        environment: Variables that differ from this process's.
        caught: Signals to this process; the first ends the command.
        stopped: Returns why the command is to be ended, or None.
        timeout_s: Seconds after which it is ended.
        quiet: Leave out what it writes to standard output.

    Returns:
        The exit code, 0 only if the command ended by itself, and in words what went wrong.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL if quiet else None,
    )
    deadline = time.monotonic() + timeout_s
    try:
        while (code := process.poll()) is None:
            if caught.first is not None:
                return caught.exit_code or 1, f"interrupted by {caught.first.name}"
            if time.monotonic() > deadline:
                return TIMED_OUT, f"not done within {timeout_s:.0f} s"
            if (why := stopped()) is not None:
                return 1, why
            time.sleep(_POLL_S)
    finally:
        _end(process)
    if caught.first is not None:  # a terminal gives Ctrl-C to the command as well
        return caught.exit_code or 1, f"interrupted by {caught.first.name}"
    return code, f"exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
