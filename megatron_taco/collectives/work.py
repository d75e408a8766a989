"""The handle of an asynchronous compressed collective."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor

from megatron_taco.collectives.pipeline import Pipeline


class Work:
    """What is left to do of a compressed collective whose first messages are under way.

    As with ``torch.distributed``, the tensors belong to the collective until :meth:`wait` has
    returned. Other than there, :meth:`wait` has work to do: it decodes, and for some algorithms it
    sends further messages. So every rank of the group has to call it, and in the same order
    relative to the group's other collectives.

    On a CUDA device the rest is launched by :meth:`wait` on the current stream, after what the
    caller launched meanwhile (a weight gradient's matrix product, say): see docs/decisions.md.
    """

    def __init__(self, pipeline: Pipeline, done: Callable[[], None], tensor: Tensor) -> None:
        """Takes over chunks under way.

        Args:
            pipeline: The chunks.
            done: Called after the last of them.
            tensor: A tensor of the collective, which tells the device.
        """
        self._rest: tuple[Pipeline, Callable[[], None]] | None = (pipeline, done)
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    @classmethod
    def done(cls) -> Work:
        """Returns the handle of a collective that had nothing to send."""
        work = cls.__new__(cls)
        work._rest, work._stream = None, None
        return work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Completes the result. Further calls do nothing.

        On a CUDA device only the current stream waits, never the host.

        Args:
            timeout: How long to wait for each message; by default the group's timeout.

        Returns:
            True; a message that does not arrive raises, as it does in ``torch.distributed``.
        """
        if self._rest is None:
            return True
        pipeline, done = self._rest
        with torch.no_grad():
            pipeline.finish(timeout)
            done()
        self._rest = None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                # The buffers go back to the pool of the stream that they were made on, which must
                # not use them again while this one still decodes them.
                self._stream.wait_stream(current)
        return True

    def is_completed(self) -> bool:
        """Tells whether the result is in place: whether :meth:`wait` has returned."""
        return self._rest is None
