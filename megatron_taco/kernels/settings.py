"""What the kernels must know of a compressor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the kernels must know of a compressor.

    Attributes:
        format: Name of the code format.
        bits: Bits of a code.
        limit: T, the largest code.
        target: M, the root mean square that the adaptive scale aims at.
        scales: ``dual``, ``merged_fp32`` or ``merged_bf16``.
        scale_bytes: Bytes of all scales of a block.
        rotate: Whether blocks are transformed.
        block: Elements of a block.
        offset: What is added to codes while payloads are summed.
    """

    format: str
    bits: int
    limit: float
    target: float
    scales: str
    scale_bytes: int
    rotate: bool
    block: int
    offset: int

    @property
    def log_limit(self) -> int:
        """floor(log2 T)."""
        return int(self.limit).bit_length() - 1

    def count(self, numel: int) -> int:
        """Blocks of ``numel`` elements."""
        return -(-numel // self.block)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a payload of ``numel`` elements."""
        return self.count(numel) * (self.block * self.bits // 8 + self.scale_bytes)


@dataclass(frozen=True)
class GroupSettings:
    """What the kernels must know of a ``BlockInteger``.

    Attributes:
        bits: Bits of a code, 4 or 8.
        limit: The largest code.
        offset: What is added to codes while payloads are summed.
        block: Elements of a group.
        transform: Order of the Hadamard transform.
        bf16: Whether a scale is BF16, else FP32.
        stochastic: Whether codes are rounded at random.
        key: Of that.
    """

    bits: int
    limit: float
    offset: int
    block: int
    transform: int
    bf16: bool
    stochastic: bool
    key: int

    def count(self, numel: int) -> int:
        """Groups of ``numel`` elements."""
        return -(-numel // self.block)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a payload of ``numel`` elements."""
        return self.count(numel) * (self.block * self.bits // 8 + (2 if self.bf16 else 4))

    @property
    def norm(self) -> float:
        """What the transform is yet to be multiplied by."""
        return float(self.transform) ** -0.5

    @property
    def log_limit(self) -> int:
        """floor(log2 limit)."""
        return int(self.limit).bit_length() - 1
