"""TAH-Quant as published (arXiv 2506.01352; papers.md 3.2): tile-wise, entropy-guided 3 or 4 bits.

A tile is 64 consecutive coordinates of a token. Of each tile x, in FP32:

    entropy   H = -sum p log p,  p = |x| / (sum |x| + eps)
    width     the ceil(0.8 T) tiles of largest H of the message's T have 4 bits, the others 3
              (the second version of the paper; the first ranked the tiles of each token)
    outlier   if the largest |x| exceeds 2 times the second largest: swap it with x_0 and
              rotate, x = H_64 x / 8; no other tile is rotated
    affine    low = min x, s = (max x - low) / (2^bits - 1), both rounded to FP16 before use;
              q = round((x - low) / s), clamped to the levels

Payload of T tiles, T4 of 4 bits: [T4 * 32 bytes][T3 * 24 bytes][T * 2 bytes s][T * 2 bytes low]
[T bytes: pivot index, 64 if an outlier, 128 if 4 bits], 4.43 bits a value; the published 4.41
have 7 bits where this has a byte. Stateless. A tile with a NaN or an infinity, or with a value
beyond FP16, decodes to NaN.
"""

from math import prod

import torch
from torch import Tensor

from megatron_taco.boundaries.quantizers import Quantizer, check_values
from megatron_taco.compressors.hadamard import hadamard_

TILE = 64
SHARE_OF_FOUR_BITS = (4, 5)
OUTLIER_RATIO = 2.0
_EPS = 1e-12
_PIVOT, _OUTLIER, _WIDE = 63, 64, 128


class TahQuant(Quantizer):
    """The quantiser above, for activations [s, b, d] with d a multiple of 64."""

    def encoded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return T4 * 32 + T3 * 24 + T * 5.

        Raises:
            ValueError: If the last dimension is no multiple of 64.
        """
        wide, narrow = _tiles(shape)
        return wide * 32 + narrow * 24 + (wide + narrow) * 5

    def encode(self, x: Tensor, learn: bool = False) -> Tensor:
        """Encode FP32, BF16 or FP16 values.

        Raises:
            TypeError: If ``x`` has another dtype.
            ValueError: If its last dimension is no multiple of 64.
        """
        check_values(x, "tah_quant")
        wide, _ = _tiles(tuple(x.shape))
        tiles = x.detach().reshape(-1, TILE).float()
        order = torch.argsort(_entropy(tiles), descending=True, stable=True)
        four = torch.zeros(len(tiles), dtype=torch.bool, device=x.device)
        four[order[:wide]] = True
        tiles, flags = _rotate_outliers(tiles)
        levels = torch.where(four, 15.0, 7.0)
        low = tiles.amin(1)
        scale = ((tiles.amax(1) - low) / levels).half()
        low = low.half()
        finite = scale.isfinite() & low.isfinite()
        scale = torch.where(finite, scale, torch.nan)
        divisor = torch.where(scale > 0, scale.float(), 1.0)
        q = (tiles - low.float()[:, None]) / divisor[:, None]
        q = torch.minimum(q.nan_to_num_(0.0).round_().clamp_min_(0.0), levels[:, None])
        codes = q.to(torch.uint8)
        first, second = _split(four, wide)
        parts = [
            _pack4(codes[first]),
            _pack3(codes[second]),
            scale,
            low,
            flags + four.to(torch.uint8) * _WIDE,
        ]
        return torch.cat([part.view(-1).view(torch.uint8) for part in parts])

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode to a tensor of ``shape`` and ``dtype``."""
        wide, narrow = _tiles(shape)
        count = wide + narrow
        nibbles, triples, scale, low, flags = payload.split(
            [wide * 32, narrow * 24, count * 2, count * 2, count]
        )
        first, second = _split(flags >= _WIDE, wide)
        q = torch.empty(count, TILE, device=payload.device)
        q[first] = _unpack4(nibbles.view(wide, 32)).float()
        q[second] = _unpack3(triples.view(narrow, 24)).float()
        scales = (each.clone().view(torch.float16).float()[:, None] for each in (scale, low))
        tiles = q.mul_(next(scales)).add_(next(scales))
        return _rotate_back(tiles, flags).to(dtype).reshape(shape)


def _tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many tiles of a tensor get 4 bits, and how many 3."""
    if shape[-1] % TILE:
        raise ValueError(
            f"tah_quant: the hidden size is {shape[-1]}, allowed are multiples of {TILE}"
        )
    count = prod(shape) // TILE
    share, of = SHARE_OF_FOUR_BITS
    wide = -(-count * share // of)
    return wide, count - wide


def _split(four: Tensor, wide: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the tiles of 4 bits and of the others, each ascending."""
    order = torch.argsort(four.to(torch.uint8), descending=True, stable=True)
    return order[:wide], order[wide:]


def _entropy(tiles: Tensor) -> Tensor:
    p = tiles.abs()
    p = p / (p.sum(1, keepdim=True) + _EPS)
    return -torch.xlogy(p, p).sum(1)


def _rotate_outliers(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Swap and rotate the tiles with an outlier: the tiles, and their flags uint8 [T]."""
    largest, at = tiles.abs().topk(2, dim=1)
    outlier = largest[:, 0] > OUTLIER_RATIO * largest[:, 1]
    rotated = _hadamard(_swap(tiles, at[:, 0]))
    flags = torch.where(outlier, at[:, 0] + _OUTLIER, 0)
    return torch.where(outlier[:, None], rotated, tiles), flags.to(torch.uint8)


def _rotate_back(tiles: Tensor, flags: Tensor) -> Tensor:
    outlier = (flags & _OUTLIER) > 0
    restored = _swap(_hadamard(tiles), (flags & _PIVOT).long())
    return torch.where(outlier[:, None], restored, tiles)


def _swap(tiles: Tensor, at: Tensor) -> Tensor:
    """Exchange element 0 and element ``at`` of each tile."""
    swapped = tiles.clone()
    rows = torch.arange(len(tiles), device=tiles.device)
    swapped[:, 0] = tiles[rows, at]
    swapped[rows, at] = tiles[:, 0]
    return swapped


def _hadamard(tiles: Tensor) -> Tensor:
    return hadamard_(tiles.t().clone(memory_format=torch.contiguous_format)).t()


def _pack4(q: Tensor) -> Tensor:
    """Pack uint8 [n, 64] below 16 to [n, 32], the even element in the low nibble."""
    return q[:, 0::2] | (q[:, 1::2] << 4)


def _unpack4(octets: Tensor) -> Tensor:
    return torch.stack([octets & 15, octets >> 4], dim=2).view(len(octets), TILE)


def _pack3(q: Tensor) -> Tensor:
    """Pack uint8 [n, 64] below 8 to [n, 24]: eight codes in a little-endian 24-bit word."""
    shifts = torch.arange(0, 24, 3, device=q.device)
    words = (q.view(len(q), 8, 8).int() << shifts).sum(2)
    octets = torch.stack([words >> shift for shift in (0, 8, 16)], dim=2) & 255
    return octets.to(torch.uint8).view(len(q), 24)


def _unpack3(octets: Tensor) -> Tensor:
    b = octets.view(len(octets), 8, 3).int()
    words = b[:, :, 0] | (b[:, :, 1] << 8) | (b[:, :, 2] << 16)
    shifts = torch.arange(0, 24, 3, device=octets.device)
    return ((words[:, :, None] >> shifts) & 7).view(len(octets), TILE)
