"""The handle of an asynchronous compressed collective."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


class Work:
    """What is left to do of a compressed collective whose first message is under way.

    As with ``torch.distributed``, the result may be read after :meth:`wait`. Other than there,
    :meth:`wait` has work to do: it decodes, and for a two-shot all-reduce it also sends the second
    message. So every rank of the group has to call it, and in the same order relative to the
    group's other collectives.
    """

    def __init__(
        self, handle: Any, finish: Callable[[], None], sent: Tensor, received: Tensor
    ) -> None:
        """Takes over a message under way.

        Args:
            handle: torch's handle of the message, or None if it is done.
            finish: Does what remains once the message has arrived. Called once.
            sent: The wire buffer that is being read; kept until the message is done.
            received: The wire buffer that is being filled; kept until it is decoded.
        """
        self._handle = handle
        self._finish: Callable[[], None] | None = finish
        self._buffers: tuple[Tensor, ...] = (sent, received)
        self._stream = torch.cuda.current_stream(sent.device) if sent.is_cuda else None

    @classmethod
    def done(cls) -> Work:
        """Returns the handle of a collective that had nothing to send."""
        work = cls.__new__(cls)
        work._handle, work._finish, work._buffers, work._stream = None, None, (), None
        return work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the message and completes the result. Further calls do nothing.

        On a CUDA device only the current stream waits, never the host.

        Args:
            timeout: How long to wait for the message under way; by default the group's timeout.

        Returns:
            True; a message that does not arrive raises, as it does in ``torch.distributed``.
        """
        if self._finish is None:
            return True
        if self._handle is not None:
            if timeout is None:
                self._handle.wait()
            else:
                self._handle.wait(timeout)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                # The allocator knows the buffers by the stream that they were made on, and would
                # give them away while this one still decodes them.
                for buffer in self._buffers:
                    buffer.record_stream(current)
        with torch.no_grad():
            self._finish()
        self._handle, self._finish, self._buffers = None, None, ()
        return True

    def is_completed(self) -> bool:
        """Tells whether the result is in place: whether :meth:`wait` has returned."""
        return self._finish is None
