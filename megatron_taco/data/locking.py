"""A lock between the processes of one machine that dies with its holder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_taco.data.errors import DataError

_POLL_S = 0.05


@contextmanager
def file_lock(path: Path, purpose: str, timeout_s: float) -> Iterator[None]:
    """Holds an exclusive ``flock`` on ``path`` for the block.

    The kernel drops the lock when its holder ends, however it ends, so the file itself may stay
    behind and means nothing.

    Args:
        path: The lock file, made if missing; its folder has to exist.
        purpose: What the lock guards, for the message.
        timeout_s: Seconds to wait for another holder.

    Raises:
        DataError: If the file cannot be opened, or the wait is over (naming the holder).
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise DataError(f"{path}: cannot open the lock: {error.strerror}") from error
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                waited = f"waited {timeout_s:g} s for" if timeout_s else "in use by"
                raise DataError(
                    f"{purpose}: {waited} process {holder or 'unknown'}, which holds {path}; end "
                    "that process or wait for it"
                )
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
