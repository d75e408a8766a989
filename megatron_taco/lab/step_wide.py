"""Uncompressed collectives that send FP32 although the tensors are BF16 or FP16.

Published speed-ups are often against communication in FP32, whose messages are twice as long. This
is the backend's own collective on FP32 copies, with Megatron's overlap: an asynchronous one goes on
until its handle is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class WideWork:
    """The handle of an asynchronous one.

    Args:
        work: The backend's.
        finish: Puts the result where it belongs; called once.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits as the backend does, and rounds the result. Further calls do nothing."""
        if self._finish is not None:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
            self._finish()
            self._finish = None
        return True


def send_wide(
    collective: str, output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool
) -> Any:
    """Runs a collective in FP32.

    Args:
        collective: ``all_reduce`` (of ``input``, which is ``output``), ``reduce_scatter`` or
            ``all_gather``.
        output: Gets the result, in its own precision.
        input: What is sent.
        group: The ranks.
        async_op: Return a handle.

    Returns:
        A handle, or None.
    """
    with torch.no_grad():
        sent = input.detach().to(torch.float32, memory_format=torch.contiguous_format)
        if collective == "all_reduce":
            result = sent if sent is not input else sent.clone()
            work = dist.all_reduce(result, group=group, async_op=async_op)
        else:
            result = torch.empty(output.shape, dtype=torch.float32, device=output.device)
            scatter = collective == "reduce_scatter"
            call = dist.reduce_scatter_tensor if scatter else dist.all_gather_into_tensor
            work = call(result, sent, group=group, async_op=async_op)

    def finish() -> None:
        with torch.no_grad():
            output.detach().copy_(result)

    if async_op and work is not None:
        return WideWork(work, finish)
    finish()
    return None
