"""Named network namespaces, as ``ip netns`` knows them, and the processes inside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from importlib import util
from pathlib import Path
from typing import Final

from megatron_taco.lab.link import LabError

FOLDER: Final = Path("/run/netns")
INSTALL: Final = "pip install 'megatron-taco[lab]'"
_KILL_S: Final = 10.0
_MNT_DETACH: Final = 2


def require() -> None:
    """Refuses a machine on which no namespace can be made.

    Raises:
        LabError: Not Linux, not root, or pyroute2 is not installed.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"the lab needs Linux network namespaces, this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabError(
            "the lab makes network namespaces, which needs root; this is user id "
            f"{os.geteuid()} (several ranks without a slow link need no root: --ranks N)"
        )
    if util.find_spec("pyroute2") is None:
        raise LabError(f"the lab needs pyroute2, which is not installed: {INSTALL}")


def inside[T](name: str | None, function: Callable[[], T]) -> T:
    """Runs ``function`` in a thread that is in a namespace; this thread stays where it is.

    Sockets opened there, and processes started there, belong to that namespace.

    Args:
        name: The namespace; None for a new one, which lives as long as something holds it.
        function: What to run.

    Returns:
        What ``function`` returns; what it raises is raised here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            if name is None:
                os.unshare(os.CLONE_NEWNET)
            else:
                file = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.setns(file, os.CLONE_NEWNET)
                finally:
                    os.close(file)
            results.append(function())
        except BaseException as error:  # to be raised in the calling thread
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def create(name: str) -> None:
    """Makes a named namespace with its loopback still down.

    Raises:
        FileExistsError: The name is taken; nothing was changed.
        LabError: The kernel or the container does not allow it.
    """
    from pyroute2 import netns

    def attach() -> None:
        try:
            netns.attach(name, "thread-self")
        except FileExistsError:
            raise
        except OSError:
            _unmount(name)
            raise

    try:
        inside(None, attach)
    except FileExistsError:
        raise
    except OSError as error:
        raise LabError(
            f"network namespace {name} cannot be made ({error}): root inside a container needs "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged)"
        ) from error


def names() -> list[str]:
    """Returns the names of all namespaces, ours or not."""
    return sorted(os.listdir(FOLDER)) if FOLDER.is_dir() else []


def processes(namespaces: Iterable[str]) -> list[int]:
    """Returns the ids of the processes in some named namespaces, zombies left out."""
    wanted = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            found = os.stat(FOLDER / name)
            wanted.add((found.st_dev, found.st_ino))
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile; a zombie has no namespace
            found = os.stat(f"/proc/{entry}/ns/net")
            if (found.st_dev, found.st_ino) in wanted:
                pids.append(int(entry))
    return pids


def remove(namespaces: Iterable[str]) -> list[int]:
    """Kills what runs in the namespaces and removes them, and with them the links inside.

    Removing what is not there does nothing.

    Returns:
        The ids of the processes that were killed.

    Raises:
        LabError: A process does not die; the namespaces stay, for another try.
    """
    namespaces = list(namespaces)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    while left := processes(namespaces):
        if time.monotonic() > deadline:
            raise LabError(
                f"processes {', '.join(map(str, left))} in {', '.join(namespaces)} survive SIGKILL "
                "(waiting in the kernel?); run `megatron-taco lab down` when they are gone"
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.02)
    for name in namespaces:
        _unmount(name)
    return sorted(killed)


def _unmount(name: str) -> None:
    """Takes a namespace's name away. Done here so that the guard, in a hurry, needs no pyroute2."""
    path = FOLDER / name
    ctypes.CDLL(None).umount2(os.fsencode(path), _MNT_DETACH)  # fails where nothing is mounted
    path.unlink(missing_ok=True)
