"""Counter-based random numbers: element i of a stream is a function of (key, i) and nothing else.

A stream is SplitMix64 (Steele, Lea, Flood 2014): output i mixes key + (i + 1) * gamma.
No generator is read or advanced, so ranks, resumed runs and recomputation draw the same numbers.
"""

from hashlib import blake2b
from math import pi, prod

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
CPU = torch.device("cpu")


def stream_key(*words: int | str) -> int:
    """Return the 64-bit key of the stream called ``words``: a purpose, seed, step, boundary ..."""
    digest = blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_bits(key: int, count: int, device: torch.device = CPU, start: int = 0) -> Tensor:
    """Return elements ``start`` .. ``start + count - 1`` of a stream: int64 [count], all 64 bits.

    Args:
        key: Of the stream, from ``stream_key``.
        count: Number of elements.
        device: Where to make them; every device gives the same.
        start: First element.
    """
    counter = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    x = counter * _signed(GAMMA) + _signed(key)
    x = (x ^ _shift_right(x, 30)) * _signed(FIRST)
    x = (x ^ _shift_right(x, 27)) * _signed(SECOND)
    return x ^ _shift_right(x, 31)


def random_below(key: int, count: int, bound: int, device: torch.device = CPU) -> Tensor:
    """Return ``count`` integers in [0, bound): int64. The bias is below bound / 2^63."""
    return _shift_right(random_bits(key, count, device), 1) % bound


def permutation(key: int, count: int, device: torch.device = CPU) -> Tensor:
    """Return the numbers 0 .. count - 1 in an order that ``key`` decides: int64 [count]."""
    return torch.argsort(random_bits(key, count, device), stable=True)


def normal(key: int, shape: tuple[int, ...], device: torch.device = CPU, start: int = 0) -> Tensor:
    """Return standard normal FP64 values (Box-Muller), elements ``start`` .. of a stream.

    Logarithm and cosine may differ in the last bit of FP64 between devices: round to FP32 or less
    where numbers have to agree.
    """
    count = prod(shape)
    u = _shift_right(random_bits(key, 2 * count, device, 2 * start), 11).double()
    u = u.add_(0.5).mul_(2.0**-53).view(count, 2)
    return ((-2.0 * u[:, 0].log()).sqrt() * (2.0 * pi * u[:, 1]).cos()).view(shape)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift int64 right and fill with zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit ``word``."""
    return word - (1 << 64) if word >= 1 << 63 else word
