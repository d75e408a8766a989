"""Symmetric few-bit integers with one scale a group, the quantiser of SDP4Bit (arXiv 2410.15526).

It differs from TACO's integer formats in that the group that shares a scale and the order of the
Hadamard transform are two settings: SDP4Bit rotates gradients by H_32 and scales groups of 128,
and scales differences of weights in groups of 2048 without rotation. The arithmetic is a definition
as TACO's is (``taco.py``): FP32, round to nearest even, fixed order, one rounding an operation.

Encoding one group x of B consecutive elements, the last one of a row padded with zeros:

    a   = max |x|;  e = clamp(floor(log2 a), -100, 126);  z = x * 2^-e
    y   = (I (x) H_T) z                         T consecutive elements at a time; y = z for T = 1
    c   = (max |y| * (1 / (sqrt(T) L))) * 2^e   L = 2^(bits-1) - 1; 17 bits (scales.py), then
                                                rounded to the scale's dtype
    v_i = clamp(y_i * (1 / (sqrt(T) c 2^-e)), -L, L)
    q_i = round half to even of v_i,  or  floor(v_i) + [u_i < v_i - floor(v_i)] if stochastic

u_i is uniform in [0, 1), from the key and the number of the element (``counter_random.py``): row r,
group j, element k of a call with g groups a row has the number (r * g + j) * B + k. A value that is
an integer already never moves, so zeros stay zeros.

Rounding to nearest, decoding, summing P payloads in rank order before the one inverse transform (it
is linear and shared) and the special groups are as in ``taco.py`` with merged scales: with T = B
the bytes are TACO's.
"""

from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from megatron_taco.compressors.counter_random import uniform
from megatron_taco.compressors.scaled import ScaledBlocks

BITS = (8, 6, 4)
GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TRANSFORMS = (1, 32, 64, 128, 256, 512)
SCALE_DTYPES = ("fp32", "bf16")
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class BlockInteger(ScaledBlocks):
    """Integers of few bits, one scale a group; the arithmetic is in this module's docstring.

    A payload of n elements in g = ceil(n / B) groups is [codes: g * B * bits / 8 bytes][g scales].

    Attributes:
        bits: Bits of a code: 8, 6 or 4.
        block: Elements that share a scale, B: a power of two from 32 to 4096.
        transform: Order T of the Hadamard transform, at most ``block``; 1 is none.
        scale: Dtype of the scale on the wire: ``fp32`` or ``bf16``.
        rounding: ``nearest`` (ties to even) or ``stochastic``.
        key: What stochastic rounding depends on, besides the element's number: see :meth:`keyed`.

    Raises:
        ValueError: If a field has a value that is not allowed.
    """

    name: ClassVar[str] = "block_integer"
    bits: int = 4
    block: int = 128
    transform: int = 32
    scale: str = "bf16"
    rounding: str = "nearest"
    key: int = 0

    def __post_init__(self) -> None:
        """Check every field, then the combination."""
        self.allow("bits", self.bits, BITS)
        self.allow("block", self.block, GROUPS)
        self.allow("transform", self.transform, TRANSFORMS)
        self.allow("scale", self.scale, SCALE_DTYPES)
        self.allow("rounding", self.rounding, ROUNDINGS)
        if self.transform > self.block:
            raise ValueError(
                f"{self.name}: transform is {self.transform}, allowed are at most the block, "
                f"{self.block}"
            )

    def keyed(self, key: int) -> Self:
        """Return this compressor with another key for stochastic rounding.

        Args:
            key: 64 bits from ``counter_random.key_of(seed, step, role, bucket, ...)``; messages
                with different keys are rounded independently.
        """
        if self.rounding == "nearest":
            return self
        _ = self._settings, self._layout  # found once and copied: the key does not matter to them
        other = copy(self)
        object.__setattr__(other, "key", key)
        return other

    @property
    def _format(self) -> str:
        return f"int{self.bits}"

    @property
    def _scales(self) -> str:
        return f"merged_{self.scale}"

    @property
    def _order(self) -> int:
        return self.transform

    @property
    def _key(self) -> int | None:
        return self.key if self.rounding == "stochastic" else None

    def _quantise(self, y: Tensor, inverse: Tensor) -> Tensor:
        if self.rounding == "nearest":
            return super()._quantise(y, inverse)
        v = y.mul_(inverse).clamp_(-self._code.limit, self._code.limit)
        u = uniform(v.numel(), self.key, v.device).view(v.shape[1], v.shape[0]).t()
        floor = v.floor()
        return self._code.pack(floor + (u < v - floor).float())
