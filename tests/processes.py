"""Finding processes that a test started, by a word on their command line."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def marked(word: str) -> list[int]:
    """The live processes, other than this one, that have ``word`` among their arguments."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                arguments = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile
                continue
            if word.encode() in arguments:
                found.append(int(entry))
    return found


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something becomes true within some time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
