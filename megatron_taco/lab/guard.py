"""Removes a lab when the process that made it dies without doing so itself.

A small process of its own session waits on a pipe from its parent. The parent writes a byte when
it has removed the lab; when the pipe closes without it, the parent was killed, and the guard
removes the lab with all that runs in it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DONE = b"."


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """Keeps a guard over lab ``name`` while the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_taco.lab.guard", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.communicate(_DONE)


def main() -> int:
    """Wait for the end of the parent; then remove the lab named by the first argument."""
    if sys.stdin.buffer.read(1) == _DONE:
        return 0
    from megatron_taco.lab import links

    links.destroy(sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
