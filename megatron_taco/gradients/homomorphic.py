"""Sums of sparse vectors in compressed form, without loss: a sketch and its exact recovery.

After "Lossless homomorphic compression" (arXiv 2402.07529). Every rank sends a bitmap of its
non-zeros; their union U is then known to all. Each element of U belongs to three cells, one in each
table, chosen by a hash of its place, with a sign:

    S[h_j(i)] += sign(i) x_i   for j = 1, 2, 3         (count-sketch)

Sketches add up: the all-reduced sketch is that of the sum. It is decoded by peeling: an element
that is alone in one of its cells has its value there; it is taken out of its other cells, which
leaves others alone, and so on. With 1.3 cells an element that reaches all of them but with small
probability; what is left then is known to every rank, and goes exactly in one more message. So the
result is the exact sum but for FP32 rounding: values that share a cell are added and subtracted.

Knowing U, the values could also go in a row, in 1 cell an element; ``packing="union"`` does that:
fewer bytes, and nothing is added but the ranks' own values. The sketch is what a switch or a server
that does not know U can add, which is the published setting.

On the wire: n/8 bytes of bitmap to every rank, then an all-reduce of 4 bytes a cell. No state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.compressors.counter_random import key_of, philox
from megatron_taco.gradients.messages import Channel, add_at, flatten, write_back
from megatron_taco.gradients.method import GradientMethod

Packing = Literal["sketch", "union"]
PACKINGS: tuple[Packing, ...] = ("sketch", "union")
TABLES = 3
CELLS_PER_ELEMENT = 1.3
_KEY = key_of("megatron_taco", "homomorphic sum")


def pack_bits(mask: Tensor) -> Tensor:
    """Returns the bits of a bool vector [n]: uint8 [ceil(n / 8)], element 8b + i in bit i."""
    padded = torch.nn.functional.pad(mask, (0, -mask.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=mask.device)
    return (padded.to(torch.int64) * weights).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Undoes :func:`pack_bits`: bool [numel]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts & 1).bool().view(-1)[:numel]


def union_of(mask: Tensor, channel: Channel) -> Tensor:
    """Returns where any rank's ``mask`` [n] is set, ascending: int64, the same on all ranks."""
    union = torch.zeros_like(mask)
    for row in channel.gather(pack_bits(mask)):
        union |= unpack_bits(row, mask.numel())
    return union.nonzero().view(-1)


def sparse_sum(values: Tensor, channel: Channel, packing: Packing) -> Tensor:
    """Sums FP32 vectors [n] that are mostly zero over the ranks of ``channel``, without loss.

    Args:
        values: This rank's; a NaN counts as non-zero, and reaches what shares its cells.
        channel: The group.
        packing: ``sketch`` or ``union``; a sketch as large as the vector itself is not made.

    Returns:
        The sum, FP32 [n], the same bits on all ranks.
    """
    places = union_of(values != 0, channel)
    result = torch.zeros_like(values)
    cells = int(places.numel() * CELLS_PER_ELEMENT / TABLES) + 8
    if packing == "union" or TABLES * cells >= values.numel():
        result[places] = channel.sum_(values[places])
        return result
    hashes, signs = _hashes(places, cells)
    sketch = torch.zeros(TABLES * cells, dtype=torch.float32, device=values.device)
    own = values[places]
    for table in range(TABLES):
        add_at(sketch, hashes[table], signs * own)
    channel.sum_(sketch)
    found, known = _peel(sketch, hashes, signs)
    left = (~known).nonzero().view(-1)
    found[left] = channel.sum_(own[left])
    result[places] = found
    return result


def _hashes(places: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Returns the cells of each place, int64 [3, u], one in each table, and its sign, FP32 [u]."""
    zero = torch.zeros_like(places)
    words = philox((places & 0xFFFFFFFF, places >> 32, zero, zero), _KEY)
    hashes = torch.stack([words[table] % cells + table * cells for table in range(TABLES)])
    return hashes, 1.0 - 2.0 * (words[3] & 1).float()


def _peel(sketch: Tensor, hashes: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Recovers the values in a sketch: FP32 [u], and which are known, bool [u]."""
    count = torch.zeros(sketch.numel(), dtype=torch.int64, device=sketch.device)
    count += torch.bincount(hashes.view(-1), minlength=sketch.numel())
    sketch = sketch.clone()
    found = torch.zeros_like(signs)
    known = torch.zeros_like(signs, dtype=torch.bool)
    while True:
        alone = count[hashes] == 1
        now = (alone.any(0) & ~known).nonzero().view(-1)
        if not now.numel():
            return found, known
        table = alone[:, now].int().argmax(0)
        found[now] = signs[now] * sketch[hashes[table, now]]
        known[now] = True
        for cell in hashes[:, now]:
            add_at(sketch, cell, -signs[now] * found[now])
            count -= torch.bincount(cell, minlength=count.numel())


class Homomorphic(GradientMethod):
    """Lossless sums of gradients that are sparse already; see this module's docstring."""

    name = "homomorphic"

    def __init__(
        self, group: ProcessGroup, *, packing: Packing = "sketch", start_step: int = 0
    ) -> None:
        """Makes the method.

        Args:
            group: The data-parallel group.
            packing: ``sketch`` (published) or ``union``.
            start_step: First step that is compressed.

        Raises:
            ValueError: A value is not allowed.
        """
        super().__init__(group, start_step=start_step)
        if packing not in PACKINGS:
            raise ValueError(f"{self.name}: packing is {packing!r}, allowed are sketch, union")
        self.packing: Packing = packing

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        if tensors:
            total = sparse_sum(flatten(tensors.values()), self._channel, self.packing)
            write_back(total.div_(self._channel.size), tensors)
