"""Residual vector quantisation: Z as indices into a codebook that both ends keep.

A token's r coordinates are G groups of w = r / G; each group is quantised in R rounds, one of K
code vectors a round, one byte a code. ``Codebook`` says how the codebook lives; during its warm-up
Z crosses as it is. Only ``learn=True`` changes anything: not evaluation, and not the first run of
layers that are recomputed.

Message: [codes: n * G * R bytes, round by round][ceil(n / 8) bytes: a bit for each token with a
NaN or an infinity, which decodes to NaN][in training, one part: R * r * K / S FP32].
"""

from math import prod

import torch
from torch import Tensor, nn

from megatron_taco.boundaries import codebooks
from megatron_taco.boundaries.codebook import Codebook
from megatron_taco.boundaries.quantizers import Plain, Quantizer, check_values
from megatron_taco.boundaries.rvq_settings import RvqSettings


class ResidualVQ(nn.Module, Quantizer):
    """The quantiser above for tensors [s, b, rank].

    Args:
        rank: Coordinates of a token r.
        settings: Sizes and rates.
        seed: Of the run.
        boundary: Number of the boundary.
        ends: Which halves this process holds: both, sender or receiver.

    Attributes:
        codebook: Its state.
    """

    def __init__(
        self, rank: int, settings: RvqSettings, seed: int, boundary: int, ends: str = "both"
    ) -> None:
        super().__init__()
        self.rank, self.boundary = rank, boundary
        self.rounds, self.groups = settings.rounds, settings.group_count(rank)
        self.codebook = Codebook(rank, settings, seed, boundary, ends)

    def encoded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return n * G * R + ceil(n / 8), or the tensor's own bytes during the warm-up."""
        if self.codebook.warming:
            return prod(shape) * dtype.itemsize
        tokens = prod(shape[:-1])
        return tokens * self.groups * self.rounds + -(-tokens // 8)

    def message_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, learn: bool) -> int:
        """Return ``encoded_bytes`` and, when learning after the warm-up, those of a part."""
        part = self.codebook.part_values * 4 if learn and not self.codebook.warming else 0
        return self.encoded_bytes(shape, dtype) + part

    def encode(self, x: Tensor, learn: bool = False) -> Tensor:
        """Encode [s, b, r] with the table in force.

        Args:
            x: FP32, BF16 or FP16.
            learn: Add this micro-batch to the step's statistics. Once for each micro-batch.

        Raises:
            TypeError: If ``x`` has another dtype.
        """
        check_values(x, f"rvq of boundary {self.boundary}")
        z = x.detach().reshape(-1, self.rank).float()
        if self.codebook.warming:
            if learn:
                self.codebook.observe(z)
            return Plain().encode(x)
        finite = z.isfinite().all(1)
        z = torch.where(finite.unsqueeze(1), z, 0.0)
        step, learned = self.codebook.step, self.codebook.learned
        rounds = []
        for place, (codes, residual) in enumerate(codebooks.assign(z, self.codebook.table)):
            rounds.append(codes)
            if learn:
                learned.add(place, codes, residual, finite.float(), step)
        if learn:
            learned.micro_batches += 1
        octets = torch.stack(rounds).to(torch.uint8).view(-1)
        return torch.cat([octets, _pack_bits(~finite)])

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode with the table in force to ``shape`` [s, b, r] and ``dtype``."""
        if self.codebook.warming:
            return Plain().decode(payload, shape, dtype)
        tokens = prod(shape[:-1])
        octets, bits = payload.split([tokens * self.groups * self.rounds, -(-tokens // 8)])
        codes = octets.view(self.rounds, tokens, self.groups).long()
        values = codebooks.decode(codes, self.codebook.table)
        spoilt = _unpack_bits(bits, tokens)
        return torch.where(spoilt.unsqueeze(1), torch.nan, values).to(dtype).view(shape)

    def pack(self, x: Tensor, learn: bool) -> Tensor:
        """Encode and, when learning after the warm-up, append this micro-batch's part."""
        micro_batch = self.codebook.learned.micro_batches
        encoded = self.encode(x, learn)
        if not learn or self.codebook.warming:
            return encoded
        return torch.cat([encoded, self.codebook.part_to_send(micro_batch).view(torch.uint8)])

    def unpack(
        self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype, learn: bool
    ) -> Tensor:
        """Decode, and keep the part for the end of the step. Messages come in their order."""
        self.check(message, self.message_bytes(shape, dtype, learn))
        encoded = self.encoded_bytes(shape, dtype)
        x = self.decode(message[:encoded], shape, dtype)
        if learn and self.codebook.warming:
            self.codebook.observe(x.reshape(-1, self.rank).float())
        elif learn:
            part = message[encoded:].clone().view(torch.float32)
            self.codebook.receive_part(self.codebook.received, part)
        return x


def _pack_bits(flags: Tensor) -> Tensor:
    """Pack bool [n] to uint8 [ceil(n / 8)], the first flag in the lowest bit."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, device=flags.device)
    return (padded * weights).sum(1).to(torch.uint8)


def _unpack_bits(octets: Tensor, count: int) -> Tensor:
    places = torch.arange(8, device=octets.device)
    return ((octets.unsqueeze(1).long() >> places) & 1).view(-1)[:count].bool()
