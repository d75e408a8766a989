"""What a rank says when training fails."""

from __future__ import annotations

import traceback
from pathlib import Path

_LOST_CONTACT = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
    "watchdog",
    "nccl communicator was aborted",
    "operation timed out",
)


def lost_contact(error: BaseException) -> bool:
    """Whether an error of torch.distributed means that another rank is gone or silent."""
    import torch.distributed as dist

    if isinstance(error, dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_CONTACT)


def describe(error: BaseException, *, rank: int, step: int | None, logs: Path) -> str:
    """The text that a failed rank prints.

    Args:
        error: what ended the run on this rank.
        rank: this rank.
        step: the training step it was in, counted from 1, or None outside of training.
        logs: folder of the ranks' logs.
    """
    when = f"in step {step}" if step is not None else "outside of a training step"
    if lost_contact(error):
        reason = str(error).strip().splitlines()[0]
        return (
            f"rank {rank}: lost contact with another rank {when} ({reason}); a rank has probably "
            f"died or hangs: look for the rank that says something else, and in {logs}"
        )
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"rank {rank} failed {when}:\n{trace}"
