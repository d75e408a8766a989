"""Sizes and rates of the residual vector quantiser."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RvqSettings:
    """All that can be chosen; 8 * rounds / width bits a coordinate.

    Attributes:
        width: Coordinates of a group w; it divides the rank.
        rounds: Residual rounds R.
        codes: Code vectors of a round and group K, 2 .. 256.
        parts: Parts S in which the codebook is streamed, a divisor of ``codes``; 0 means ``codes``.
        decay: Of the running counts and sums, a step.
        dead: A code used less than this times the mean of its group and round is put elsewhere.
        candidates: At most so many dead codes of a group and round are put elsewhere in a step.
        warmup_steps: Steps that come before quantisation, at least 1.
        sample: Tokens that the first table is made from, over all replicas.
        iterations: Of k-means.

    Raises:
        ValueError: If a field is out of range.
    """

    width: int = 4
    rounds: int = 4
    codes: int = 256
    parts: int = 0
    decay: float = 0.99
    dead: float = 0.01
    candidates: int = 32
    warmup_steps: int = 100
    sample: int = 8192
    iterations: int = 10

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("width", "rounds", "candidates", "warmup_steps", "iterations"):
            self._require(getattr(self, name) >= 1, name, "1 or more")
        self._require(2 <= self.codes <= 256, "codes", "2 .. 256")
        divides = self.parts >= 0 and self.codes % self.part_count == 0
        self._require(divides, "parts", f"0 and the divisors of {self.codes} (codes)")
        self._require(0.0 <= self.decay < 1.0, "decay", "0 <= decay < 1")
        self._require(0.0 <= self.dead < 1.0, "dead", "0 <= dead < 1")
        self._require(self.sample >= self.codes, "sample", f"{self.codes} (codes) or more")

    @property
    def part_count(self) -> int:
        """Parts in which the codebook is streamed, S."""
        return self.parts or self.codes

    def group_count(self, rank: int) -> int:
        """Return the groups of a token of ``rank`` coordinates.

        Raises:
            ValueError: If ``width`` does not divide it.
        """
        if rank % self.width:
            raise ValueError(f"rvq: width is {self.width}, allowed are divisors of {rank} (rank)")
        return rank // self.width

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise ValueError(f"rvq: {name} is {getattr(self, name)}, allowed is {allowed}")
