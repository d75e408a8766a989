"""What the compressed collectives must give, computed by one process from all ranks' inputs.

Only the compressor is shared with the code under test: slices, padding and order are worked out
here again, one rank after the other.
"""

import hashlib
import math

import torch
from torch import Tensor

from megatron_taco.compressors import Compressor


def inputs(world_size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Returns a Gaussian input for each rank; every process makes the same ones."""
    made = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        made.append(torch.randn(numel, generator=generator).to(dtype))
    return made


def one_shot(xs: list[Tensor], compressor: Compressor) -> Tensor:
    """All-reduce in one lossy step."""
    payloads = torch.stack([compressor.encode(x) for x in xs])
    return compressor.decode_sum(payloads, xs[0].numel()).to(xs[0].dtype)


def two_shot(xs: list[Tensor], compressor: Compressor) -> Tensor:
    """All-reduce in two lossy steps, over slices of whole blocks."""
    numel, dtype = xs[0].numel(), xs[0].dtype
    block = compressor.block
    width = math.ceil(math.ceil(numel / block) / len(xs)) * block
    slices = []
    for start in range(0, width * len(xs), width):
        encoded = []
        for x in xs:
            part = torch.zeros(width, dtype=dtype)
            piece = x[start : start + width]
            part[: piece.numel()] = piece
            encoded.append(compressor.encode(part))
        total = compressor.reduce_encode(torch.stack(encoded), width)
        slices.append(compressor.decode(total, (width,), dtype))
    return torch.cat(slices)[:numel]


def hierarchical(xs: list[Tensor], nodes: list[list[int]], compressor: Compressor) -> Tensor:
    """All-reduce in three lossy steps; the ranks of each node are given, in any order of nodes.

    Piece ``place * M + m`` is summed by the m-th of the ranks that have that place in their nodes.
    """
    numel, dtype = xs[0].numel(), xs[0].dtype
    block = compressor.block
    width = math.ceil(math.ceil(numel / block) / len(xs)) * block
    padded = [torch.zeros(width * len(xs), dtype=dtype) for _ in xs]
    for whole, x in zip(padded, xs, strict=True):
        whole[:numel] = x
    pieces = []
    for piece in range(len(xs)):
        place = piece // len(nodes)
        part = slice(piece * width, (piece + 1) * width)
        sums = {}
        for ranks in nodes:
            encoded = torch.stack([compressor.encode(padded[r][part]) for r in sorted(ranks)])
            sums[sorted(ranks)[place]] = compressor.reduce_encode(encoded, width)
        total = torch.stack([sums[r] for r in sorted(sums)])
        pieces.append(compressor.decode(compressor.reduce_encode(total, width), (width,), dtype))
    return torch.cat(pieces)[:numel]


def reduce_scatter(xs: list[Tensor], rank: int, compressor: Compressor) -> Tensor:
    """The slice of ``rank`` of the sum, in one lossy step."""
    return one_shot([x.chunk(len(xs))[rank] for x in xs], compressor)


def all_gather(xs: list[Tensor], compressor: Compressor) -> Tensor:
    """All inputs in a row, each encoded and decoded."""
    return torch.cat([compressor.decode(compressor.encode(x), x.shape, x.dtype) for x in xs])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tells whether two tensors are equal to the bit: NaN equals itself, +0 is not -0."""
    return a.shape == b.shape and a.dtype == b.dtype and digest(a) == digest(b)


def digest(x: Tensor) -> str:
    """Returns a hash of the bytes of a tensor."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.tolist())).hexdigest()


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Returns the relative RMS error, in FP64."""
    difference = found.double() - exact.double()
    return float(difference.norm() / exact.double().norm())
