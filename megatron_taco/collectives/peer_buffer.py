"""The memory through which the ranks of one group read each other's payloads.

It has two slots, which calls use in turn, and one barrier a call. Call k of a rank

    writes slot k mod 2,  passes barrier k,  reads slot k mod 2 of all ranks,

in this order on its device. Nobody reads what is not written yet: a rank that passes barrier k
knows that all have arrived at it, thus written. And nobody writes what is still being read: call
k + 2, the next to write that slot, comes after barrier k + 1, at which a peer arrives only after
its reads of call k. One slot would need a second barrier, after the reads.

This holds only while a rank's calls follow each other, none between two steps of another. So all
of a call is launched at once, and a call on another stream waits for the stream of the one before.
A CUDA graph is refused: replayed, its first call could use the slot of the call just before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_taco.collectives.symmetric import Mapping

SLOTS = 2
ALIGNMENT = 512
"""Slots start at multiples of it, in bytes."""


class Slot(NamedTuple):
    """Where the payloads of one call are.

    Attributes:
        mine: uint8 [bytes], for this rank's payload.
        addresses: int64 [P], on the device: where the payload of each rank is.
        barrier: Launched between writing and reading.
    """

    mine: Tensor
    addresses: Tensor
    barrier: Callable[[], None]


class PeerBuffer:
    """The slots of one group, as large as its largest message so far."""

    def __init__(self, map_memory: Callable[[int], Mapping], device: torch.device) -> None:
        """Takes what allocates and maps so many bytes on all ranks at once, and this rank's device.

        Nothing is mapped yet.
        """
        self._map_memory = map_memory
        self._device = device
        self._capacity = 0
        self._calls = 0
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._mapping: Mapping | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, nbytes: int) -> Slot:
        """Returns the slot of the next call, and makes that come after the one before.

        All ranks make their calls in the same order, with the same sizes. A size above all before
        is a collective call, see :meth:`reserve`.

        Args:
            nbytes: Bytes of a payload.

        Raises:
            RuntimeError: A CUDA graph is being captured, or memory cannot be mapped.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "algorithm: peer_read cannot be captured in a CUDA graph, since its calls take "
                "turns with two buffers; allowed there: auto, one_shot, two_shot"
            )
        mapping = self.reserve(nbytes)
        self._follow()
        memory, addresses = self._slots[self._calls % SLOTS]
        self._calls += 1
        return Slot(memory[:nbytes], addresses, mapping.barrier)

    def _follow(self) -> None:
        """Puts what the current stream does next behind the call before, on whichever stream."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def reserve(self, nbytes: int) -> Mapping:
        """Maps larger slots in place of those that there are, if these are too small.

        That is collective, and waits for the host and for the calls before.

        Raises:
            RuntimeError: Memory cannot be mapped.
        """
        if self._mapping is not None and nbytes <= self._capacity:
            return self._mapping
        if self._mapping is not None:
            # All ranks come here in the same call, and then have read what they had to read of the
            # old memory, which goes.
            self._follow()
            self._mapping.barrier()
            if self._stream is not None:
                self._stream.synchronize()
        capacity = -(-nbytes // ALIGNMENT) * ALIGNMENT
        mapping = self._map_memory(SLOTS * capacity)
        starts = [slot * capacity for slot in range(SLOTS)]
        self._slots = [
            (
                mapping.mine[start : start + capacity],
                torch.tensor(
                    [address + start for address in mapping.addresses],
                    dtype=torch.int64,
                    device=self._device,
                ),
            )
            for start in starts
        ]
        self._mapping, self._capacity = mapping, capacity
        return mapping
