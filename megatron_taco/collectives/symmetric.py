"""Memory that all ranks of a group can read, from torch's symmetric memory.

torch decides about NVLink multicast when memory is mapped (``TORCH_SYMM_MEM_DISABLE_MULTICAST``);
nothing here uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

BACKEND = "CUDA"
"""The allocator of torch that maps peers' memory by the driver's own calls."""


class Mapping(NamedTuple):
    """Memory of one rank that its peers read, and theirs.

    Attributes:
        mine: uint8 [bytes], this rank's.
        addresses: Where the memory of each rank starts, as this rank's device sees it; all are
            multiples of 16.
        barrier: Launches what makes the current stream wait until all ranks of the group have
            come as far, with what they wrote before in sight of all.
    """

    mine: Tensor
    addresses: tuple[int, ...]
    barrier: Callable[[], None]


def unavailable(device: torch.device) -> str | None:
    """Says why torch has no symmetric memory of the kind that is needed; None if it has."""
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError as error:
        return f"this torch {torch.__version__} has no symmetric memory ({error})"
    found = symmetric.get_backend(device)
    if found != BACKEND:
        return (
            f"torch's symmetric memory is {found!r} on {device}, needed is {BACKEND!r}; "
            f"set TORCH_SYMMMEM={BACKEND} or unset it"
        )
    return None


def map_memory(group: ProcessGroup, device: torch.device, nbytes: int) -> Mapping:
    """Allocates memory and maps that of all ranks; a collective call that waits for the host.

    Args:
        group: An NCCL group; its timeout is that of the barrier, which then ends the process with
            a message of torch's.
        device: This rank's GPU.
        nbytes: Bytes, the same on all ranks.

    Raises:
        RuntimeError: torch cannot map it.
    """
    from torch.distributed import _symmetric_memory as symmetric

    try:
        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        raise RuntimeError(
            f"{nbytes} bytes that the {group.size()} ranks can all read cannot be mapped: "
            f"{str(error).splitlines()[0]}"
        ) from error
    ranks = range(group.size())
    addresses = tuple(handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr() for rank in ranks)
    if any(address % 16 for address in addresses):
        raise RuntimeError(f"torch mapped memory at {addresses}, not all multiples of 16")
    timeout: timedelta = group._get_backend(device).options._timeout
    timeout_ms = int(timeout.total_seconds() * 1000)

    def barrier() -> None:
        handle.barrier(channel=0, timeout_ms=timeout_ms)

    return Mapping(memory, addresses, barrier)
