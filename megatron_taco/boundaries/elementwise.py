"""Boundaries that quantise the activation itself and have no state."""

from torch import Tensor

from megatron_taco.boundaries.affine import AffineHadamard
from megatron_taco.boundaries.boundary import Boundary, Place
from megatron_taco.boundaries.quantizers import Blockwise, Quantizer
from megatron_taco.boundaries.tah_quant import TILE, TahQuant
from megatron_taco.compressors import Taco

COCCL_BLOCK = 128


class Elementwise(Boundary):
    """A boundary whose halves are the identity; all is done by the quantisers."""

    def __init__(self, place: Place, hidden: int, there: Quantizer, back: Quantizer) -> None:
        super().__init__(place, hidden, hidden, there, back)

    def encode(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """Return ``x`` [s, b, d]."""
        return x

    def decode(self, z: Tensor, ids: Tensor | None) -> Tensor:
        """Return ``z`` [s, b, d]."""
        return z

    def error_pair(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return ``x`` and its decoded code."""
        return x, self.there.cross(x, False)


class TacoBoundary(Elementwise):
    """TACO both ways: E4M3, blocks of 256, Hadamard, dual scales."""

    kind = "taco"

    def __init__(self, place: Place, hidden: int) -> None:
        super().__init__(place, hidden, Blockwise(Taco()), Blockwise(Taco()))


class Int8Hadamard(Elementwise):
    """COCCL's partner of TACO (papers.md 1.5): 8 bits, blocks of 128, Hadamard.

    Forward with an offset, backward symmetric.
    """

    kind = "int8_hadamard"

    def __init__(self, place: Place, hidden: int) -> None:
        back = Blockwise(Taco("int8", COCCL_BLOCK, "hadamard", "merged_fp32"))
        super().__init__(place, hidden, AffineHadamard(COCCL_BLOCK), back)


class TahQuantBoundary(Elementwise):
    """TAH-Quant as published: 3 or 4 bits forward, plain 6-bit fixed point backward.

    The scale of the backward direction was not found; here it is one for each tile of 64.

    Raises:
        ValueError: If the hidden size is no multiple of 64.
    """

    kind = "tah_quant"

    def __init__(self, place: Place, hidden: int) -> None:
        if hidden % TILE:
            raise ValueError(
                f"tah_quant: the hidden size is {hidden}, allowed are multiples of {TILE}"
            )
        back = Blockwise(Taco("int6", TILE, "none", "merged_fp32"))
        super().__init__(place, hidden, TahQuant(), back)
