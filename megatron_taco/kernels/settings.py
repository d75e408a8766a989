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
        order: Elements that are transformed together, T, from 32 to ``block``; 1 for none.
        block: Elements of a block.
        offset: What is added to codes while payloads are summed.
        random: Whether integers are rounded by ``counter_random.py``'s bits.
    """

    format: str
    bits: int
    limit: float
    target: float
    scales: str
    scale_bytes: int
    order: int
    block: int
    offset: int
    random: bool = False

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
