"""The stream on which the rest of an asynchronous collective runs."""

from __future__ import annotations

from functools import cache

import torch


@cache
def side_stream(index: int) -> torch.cuda.Stream:
    """Returns the side stream of a CUDA device, one for the life of the process.

    What runs there was launched after the work that it runs beside, never before: see
    docs/decisions.md.

    Args:
        index: Of the device.
    """
    return torch.cuda.Stream(index)
