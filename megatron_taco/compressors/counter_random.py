"""Random bits that depend on a key and a position alone: Philox 4x32-10.

Random rounding may not come from a generator with a state: recomputation, another stream or
another order of calls would then give other bytes. Here bits are a function of a key, made from
what the tensor is, and of the element's number. Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) is also what Triton's ``tl.randint4x(key, counter)`` computes.
"""

from hashlib import blake2b

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def key_of(*parts: int | str) -> int:
    """Return 64 bits that stand for ``parts``: seed, step, role, bucket, direction, rank and so on.

    Args:
        parts: Whatever names the tensor, in a fixed order; 1 and "1" are different.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> list[Tensor]:
    """Return the four 32-bit outputs of Philox 4x32-10 as int64 tensors in [0, 2^32).

    Args:
        counters: Four words in [0, 2^32), int64 tensors of one shape; word 0 is the lowest.
        key: 64 bits, the low 32 being key word 0.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(ROUNDS):
        # int64 wraps, and the low 64 bits of the product are right all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = p0 >> 32 & _MASK, p1 >> 32 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def uniform(numel: int, key: int, device: torch.device) -> Tensor:
    """Return FP32 [numel] in [0, 1), multiples of 2^-24.

    Element i comes from word i % 4 of counter i // 4.

    Args:
        numel: How many.
        key: 64 bits; see :func:`key_of`.
        device: Where they are wanted.
    """
    counter = torch.arange(-(-numel // 4), dtype=torch.int64, device=device)
    zero = torch.zeros_like(counter)
    words = torch.stack(philox((counter & _MASK, counter >> 32, zero, zero), key), dim=1)
    return (words.view(-1)[:numel] >> 8).float() * 2.0**-24
