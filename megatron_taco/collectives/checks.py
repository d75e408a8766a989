"""What a compressed collective refuses, before it sends anything."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are compressed. Everything else must go plain."""


def group_size(group: ProcessGroup) -> int:
    """Returns the number of ranks of ``group``, once it is sure that the group can be used.

    Args:
        group: A process group that this rank is a member of.

    Returns:
        The size of the group.

    Raises:
        TypeError: ``group`` is no process group, which is also how torch marks a group that this
            rank is not in.
        RuntimeError: The group is inside torch's ``_coalescing_manager``. That defers collectives
            until it exits, so a decode would read buffers that nothing has filled yet.
    """
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group: got {group!r}, expected a ProcessGroup that this rank is a member of "
            "(None, for the default group, is not accepted: name the group)"
        )
    if group in distributed_c10d._world.pg_coalesce_state:
        raise RuntimeError(
            "a compressed collective cannot run inside torch.distributed's _coalescing_manager, "
            "which defers its messages until after they would have been decoded"
        )
    return group.size()


def check_tensor(name: str, tensor: Tensor, size: int) -> None:
    """Refuses a tensor that must not be compressed.

    Args:
        name: What the caller calls the tensor.
        tensor: The tensor.
        size: The number of ranks of the group, for the message.

    Raises:
        TypeError: Its dtype is not FP32, BF16 or FP16.
        ValueError: It is sparse.
    """
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{_describe(name, tensor, size)}: only {allowed} can be compressed")
    if tensor.layout != torch.strided:
        raise ValueError(f"{_describe(name, tensor, size)}: only dense tensors can be compressed")


def check_chunks(chunks: int | None) -> None:
    """Refuses a number of chunks below 1.

    Raises:
        ValueError: It is below 1.
    """
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks: got {chunks}, allowed: 1 or more, or None for the default")


def check_pair(output: Tensor, input: Tensor, whole: str, size: int) -> None:
    """Refuses the tensors of a reduce-scatter or an all-gather if they do not fit together.

    Args:
        output: Where the result goes.
        input: What this rank contributes.
        whole: Which of them holds all slices: "input" or "output".
        size: The number of ranks of the group.

    Raises:
        TypeError: A dtype cannot be compressed, or the two differ.
        ValueError: The element counts are not P to 1, or the tensors are on different devices.
    """
    check_tensor("output", output, size)
    check_tensor("input", input, size)
    both = f"{_describe('output', output, size)} and {_describe('input', input, size)}"
    if output.dtype != input.dtype:
        raise TypeError(f"{both}: the dtypes must be the same")
    if output.device != input.device:
        raise ValueError(f"{both}: on {output.device} and {input.device}, must be on one device")
    large, small = (input, output) if whole == "input" else (output, input)
    if large.numel() != size * small.numel():
        other = "output" if whole == "input" else "input"
        raise ValueError(
            f"{both}: {whole} must have {size} times the elements of {other}, "
            f"has {large.numel()} against {small.numel()}"
        )


def _describe(name: str, tensor: Tensor, size: int) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {dtype}{list(tensor.shape)} in a group of {size}"
