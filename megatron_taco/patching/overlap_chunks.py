"""Products, sums and gathers of a linear that are done a chunk of tokens at a time.

A chunk is the same part of the tokens of every rank's slice: of an all-reduce, which leaves every
rank the whole, there is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_taco.collectives.parts import SendPart
from megatron_taco.collectives.work import Work


@dataclass(kw_only=True)
class PendingSum:
    """Chunks of a product that are being summed.

    Attributes:
        product: the whole product [s, b, n].
        result: where the sums go: ``product`` itself or, of a reduce-scatter, a slice [s/P, b, n].
        last: the last chunk's message; all others have been waited for.
    """

    product: Tensor
    result: Tensor
    last: Work | None = None


@dataclass(kw_only=True)
class PendingGather:
    """An input that is being gathered.

    Attributes:
        gathered: where it goes, [s, b, k].
        input: this rank's slice [s/P, b, k].
        ranges: tokens of a slice, chunk by chunk.
        size: ranks P.
        send: sends them.
        works: the messages begun.
    """

    gathered: Tensor
    input: Tensor
    ranges: list[tuple[int, int]]
    size: int
    send: SendPart
    works: list[Work] = field(default_factory=list)

    def begin_next(self) -> None:
        """Send the next chunk, if there is one left."""
        if len(self.works) == len(self.ranges):
            return
        first, last = self.ranges[len(self.works)]
        output = slices(self.gathered, self.size)[:, first:last].view(self.size, -1)
        self.works.append(self.send(output, self.input[first:last].reshape(-1)))

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The tokens of each chunk once it has arrived, the next one being under way."""
        for index, tokens in enumerate(self.ranges):
            self.begin_next()
            self.works[index].wait()
            yield tokens


class Product:
    """Makes a product a chunk at a time: the same tokens of every rank's slice.

    Args:
        input: [s, b, k], contiguous.
        matrix: [k, n].
        product: [s, b, n], contiguous.
        size: ranks P; each has a slice of s / P tokens.
    """

    def __init__(self, input: Tensor, matrix: Tensor, product: Tensor, size: int) -> None:
        self._batch = input.shape[1]
        self._rows = input.view(size, -1, input.shape[-1])
        self._matrix = matrix.expand(size, *matrix.shape)
        self._product = product.view(size, -1, product.shape[-1])

    def __call__(self, first: int, last: int) -> None:
        """Fill in the tokens ``[first, last)`` of every slice."""
        rows = slice(first * self._batch, last * self._batch)
        torch.bmm(self._rows[:, rows], self._matrix, out=self._product[:, rows])


def slices(whole: Tensor, size: int) -> Tensor:
    """The slices of all ranks, [P, s/P, b, n] of a contiguous [s, b, n]."""
    return whole.view(size, -1, *whole.shape[1:])


def plain_product(input: Tensor, other: Tensor) -> bool:
    """Whether the product is [s, b, k] by [k, n] as it stands: no autocast, no mixed dtypes."""
    return (
        input.dim() == 3
        and other.dim() == 2
        and input.numel() > 0
        and input.dtype == other.dtype
        and not torch.is_autocast_enabled(input.device.type)
    )


def same_memory(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are the same memory, read alike (mine is alive, so none reuses it)."""
    return (
        mine.data_ptr() == theirs.data_ptr()
        and mine.shape == theirs.shape
        and mine.stride() == theirs.stride()
        and mine.dtype == theirs.dtype
    )
