"""The handle of an asynchronous compressed collective."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor

from megatron_taco.collectives.pipeline import Pipeline
from megatron_taco.collectives.streams import side_stream


class Work:
    """What is left to do of a compressed collective whose first messages are under way.

    As with ``torch.distributed``, the tensors belong to the collective until :meth:`wait` has
    returned. Other than there, :meth:`wait` has work to do: it decodes, and for some algorithms it
    sends further messages. So every rank of the group has to call it, and in the same order
    relative to the group's other collectives.

    On a CUDA device that work goes to a side stream, for which the current one then waits. What
    the caller launched since the collective began (a weight gradient's matrix product, say) is not
    waited for, but runs beside it.
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
        if self._stream is None:
            _finish(pipeline, done, timeout)
        else:
            self._finish_beside(self._stream, pipeline, done, timeout)
        self._rest = None
        return True

    @staticmethod
    def _finish_beside(
        start: torch.cuda.Stream,
        pipeline: Pipeline,
        done: Callable[[], None],
        timeout: timedelta | None,
    ) -> None:
        """Finishes on the side stream.

        It begins with a wait for a message, which was sent after all that ``start`` did before, so
        nothing is read or written too early. The buffers come from the pool of ``start`` and go
        back to it here: it has to wait as well before they are used again.
        """
        side = side_stream(start.device.index)
        with torch.cuda.stream(side):
            _finish(pipeline, done, timeout)
        current = torch.cuda.current_stream(start.device)
        current.wait_stream(side)
        if start != current:
            start.wait_stream(side)

    def is_completed(self) -> bool:
        """Tells whether the result is in place: whether :meth:`wait` has returned."""
        return self._rest is None


def _finish(pipeline: Pipeline, done: Callable[[], None], timeout: timedelta | None) -> None:
    with torch.no_grad():
        pipeline.finish(timeout)
        done()
