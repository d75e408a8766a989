"""Where codes and scales lie in a payload: [all codes][first scale of all][second of all]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_taco.compressors.blocks import block_count


@dataclass(frozen=True)
class Layout:
    """The bytes of a payload: whole blocks of codes, then each kind of scale, block by block.

    Attributes:
        block: Elements of a block, B.
        bits: Bits of a code; a block's codes fill B * bits / 8 whole bytes.
        scales: Dtype of each scale that a block has, in the order in which they are sent.
    """

    block: int
    bits: int
    scales: tuple[torch.dtype, ...]

    @property
    def code_bytes(self) -> int:
        """Bytes of one block's codes."""
        return self.block * self.bits // 8

    def payload_bytes(self, numel: int) -> int:
        """Return ceil(numel / B) * (bytes of a block's codes and scales)."""
        scale_bytes = sum(dtype.itemsize for dtype in self.scales)
        return block_count(numel, self.block) * (self.code_bytes + scale_bytes)

    def write(self, rows: int, numel: int, codes: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
        """Lay out ``rows`` payloads of ``numel`` elements each: uint8 [R, payload_bytes].

        Args:
            rows: Number of payloads R.
            numel: Elements in each, in g blocks.
            codes: uint8 [code_bytes, R * g], a block in a column.
            scales: One [R * g] tensor for each kind of scale, of that kind's dtype.
        """
        count = block_count(numel, self.block)
        payloads = codes.new_empty(rows, self.payload_bytes(numel))
        at = count * self.code_bytes
        if rows == 1:
            payloads[0, :at].view(count, self.code_bytes).copy_(codes.t())
        else:
            payloads[:, :at].copy_(codes.t().contiguous().view(rows, at))
        for scale in scales:
            size = count * scale.dtype.itemsize
            payloads[:, at : at + size].copy_(scale.view(torch.uint8).view(rows, size))
            at += size
        return payloads

    def read_codes(self, payloads: Tensor, numel: int) -> Tensor:
        """Return the codes of uint8 [R, payload_bytes]: uint8 [code_bytes, R * g]."""
        count = block_count(numel, self.block)
        codes = payloads[:, : count * self.code_bytes]
        return codes.reshape(payloads.shape[0] * count, self.code_bytes).t().contiguous()

    def read_scales(self, payloads: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Return each kind of scale of uint8 [R, payload_bytes]: FP32 [R, g], any alignment."""
        count = block_count(numel, self.block)
        at = count * self.code_bytes
        found = []
        for dtype in self.scales:
            size = count * dtype.itemsize
            aligned = payloads[:, at : at + size].clone(memory_format=torch.contiguous_format)
            found.append(aligned.view(-1).view(dtype).float().view(payloads.shape[0], count))
            at += size
        return tuple(found)
