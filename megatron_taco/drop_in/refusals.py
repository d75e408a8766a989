"""How a refusal of ours ends a process that is not ours: one line, and its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

FAILED, USER_ERROR = 1, 2


def refuse(error: BaseException) -> int | None:
    """Print a refusal of ours, once a machine: its ranks find the same one and leave alike.

    Returns:
        The exit code, or None (and nothing is printed) for an error that is not ours.
    """
    from megatron_taco.config import ConfigError
    from megatron_taco.patching.errors import PatchError
    from megatron_taco.patching.flows import FlowCheckError

    if not isinstance(error, ConfigError | PatchError | FlowCheckError):
        return None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    return FAILED if isinstance(error, FlowCheckError) else USER_ERROR


@contextlib.contextmanager
def exit_on_refusal() -> Iterator[None]:
    """End the process where a refusal of ours comes up; other errors pass."""
    try:
        yield
    except Exception as error:
        code = refuse(error)
        if code is None:
            raise
        sys.exit(code)
