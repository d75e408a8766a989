"""Several machines run the parts of a list together: the first says which, all go on together.

Only the first machine has the results, so only it knows which parts are there already. It tells the
others through a TCP store of its own, beside those of torchrun.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from megatron_taco.lab.link import LabError

_MEET: Final = timedelta(minutes=10)
"""How long the machines wait for each other at the start."""
_PART: Final = timedelta(minutes=20)
"""More than a part may take."""
_LEAVE_S: Final = 30.0
_AFTER_FAILURE_S: Final = 20.0
"""How long a part may go on once it has failed on another machine."""


class Nodes:
    """The machines.

    Args:
        count: How many, two or more.
        rank: Number of this one, from 0.
        address: Of machine 0.
        port: Of machine 0, for the store; another than torchrun's.

    Raises:
        LabError: The machines did not meet.
    """

    def __init__(self, *, count: int, rank: int, address: str, port: int) -> None:
        import torch.distributed as dist

        self.count, self.rank = count, rank
        self._where = f"{address}:{port}"
        self._number = 0
        self._failed_at: float | None = None
        try:
            self._store = dist.TCPStore(
                address, port, count, is_master=rank == 0, timeout=_MEET, wait_for_workers=True
            )
        except (RuntimeError, OSError) as error:
            raise LabError(
                f"machine {rank} of {count} did not meet the others at {self._where}: is machine 0 "
                f"there, and the port free and open? ({_first_line(error)})"
            ) from None

    @property
    def first(self) -> bool:
        """Whether this machine says what is run."""
        return self.rank == 0

    def announce(self, name: str) -> None:
        """On the first machine: all run this part now."""
        self._number += 1
        self._failed_at = None
        self._store.set(f"part/{self._number}", name)

    def leave(self) -> None:
        """On the first machine: there are no more parts. Waits until the others know."""
        self.announce("")
        end = time.monotonic() + _LEAVE_S
        while self._store.add("left", 0) < self.count - 1 and time.monotonic() < end:
            time.sleep(0.1)

    def announced(self) -> Iterator[str]:
        """On the others: yields the parts as they are announced.

        Raises:
            LabError: The first machine is gone.
        """
        while True:
            self._number += 1
            self._failed_at = None
            key = f"part/{self._number}"
            try:
                self._store.wait([key], _PART)
                name = self._store.get(key).decode()
            except (RuntimeError, OSError) as error:
                raise LabError(
                    f"machine 0 at {self._where} says nothing more ({_first_line(error)})"
                ) from None
            if not name:
                self._store.add("left", 1)
                return
            yield name

    def quit(self) -> None:
        """On the others: this machine was told to end, and takes no further part."""
        self._store.add("quit", 1)

    def complete(self) -> bool:
        """On the first machine: whether none of the others has quit."""
        return self._store.add("quit", 0) == 0

    def ended(self, code: int) -> None:
        """Tells the others how the part ended here."""
        if code:
            self._store.add(f"failed/{self._number}", 1)

    def stopped(self) -> str | None:
        """Returns why the part is to be ended here: it failed elsewhere some time ago."""
        if self._failed_at is None:
            if self._store.add(f"failed/{self._number}", 0):
                self._failed_at = time.monotonic()
            return None
        if time.monotonic() - self._failed_at > _AFTER_FAILURE_S:
            return "failed on another machine"
        return None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
