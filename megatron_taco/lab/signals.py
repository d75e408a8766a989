"""Ctrl-C and SIGTERM as a flag to look at, so that neither can interrupt a clean-up."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Caught:
    """Context in which SIGINT, SIGTERM and SIGHUP are counted and otherwise without effect.

    Outside the main thread, where Python takes no signals, it does nothing.

    Attributes:
        first: The first signal that came, or None.
        count: How many came.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back to whom they were with."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self.count += 1

    @property
    def exit_code(self) -> int | None:
        """128 + the signal, as shells report it; None if none came."""
        return None if self.first is None else 128 + self.first
