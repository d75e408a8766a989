"""Collectives of data-parallel buckets: reduce-scatter, all-reduce, all-gather of differences.

As the collectives of tensors (``all_reduce.py`` and its neighbours), but of a flat bucket in which
kinds of parameters are encoded apart and some go exactly (``segments.py``). All sums are of decoded
values, in FP32, in rank order, rounded to the bucket's dtype once; every rank decodes the same
bytes, its own included.

A *codec* names the compressor of one message: ``codec(direction, slice, kind)``, so that random
rounding can depend on what is sent; compressors without it are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import launch, wire
from megatron_taco.collectives.pipeline import Chunk, Pipeline
from megatron_taco.collectives.segments import Part, Slice
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor

Codec = Callable[[str, int, str], Compressor]
OnPart = Callable[[str, Tensor, Tensor, Compressor], None]
"""Called with the kind, this rank's values [n], its payload uint8 [1, b], and its compressor."""

REDUCE, RESULT = "reduce", "result"
"""Directions of a codec: contributions to a sum, and the sum on its way back."""


def reduce_scatter(
    output: Tensor,
    bucket: Tensor,
    *,
    slices: tuple[Slice, ...],
    group: ProcessGroup,
    codec: Codec,
    average: bool,
    on_part: OnPart,
) -> Work:
    """Sums ``bucket`` over the ranks of ``group`` and leaves slice r of it on rank r.

    Args:
        output: Gets this rank's slice; may be a view of ``bucket``.
        bucket: FP32, BF16 or FP16 [N].
        slices: One a rank, together the whole bucket, of equal lengths.
        group: The group, of P ranks.
        codec: See this module.
        average: Divide the FP32 sum by P.
        on_part: Sees the payloads that this rank encoded.

    Returns:
        The handle: ``output`` is ready once its ``wait`` has returned.
    """
    mine = slices[group.rank()]

    def chunk() -> Chunk:
        sent = encode_slices(bucket, list(enumerate(slices)), codec, on_part)
        received = sent.new_empty(group.size(), mine.size)
        yield _exchange(received, sent, slices, group)
        divisor = group.size() if average else None
        for part, total in sums(received, mine, codec, output.dtype, divisor):
            # The part's places count from the bucket's start, the output's from the slice's.
            part.shifted(mine.start).put(total, output)

    return start(chunk(), bucket)


def all_reduce(
    bucket: Tensor,
    *,
    slices: tuple[Slice, ...],
    group: ProcessGroup,
    codec: Codec,
    average: bool,
    on_part: OnPart,
) -> Work:
    """Sums ``bucket`` over the ranks of ``group`` in place; all ranks get the same bits.

    Args:
        bucket: FP32, BF16 or FP16 [N].
        slices: One slice that is the whole bucket: every rank sends it to all others, one lossy
            step. Or one a rank: two-shot, the sums of slices are encoded again.
        group: The group, of P ranks.
        codec: See this module.
        average: Divide the FP32 sum by P.
        on_part: Sees the payloads that this rank encoded.

    Returns:
        The handle: the sum is in ``bucket`` once its ``wait`` has returned.
    """
    divisor = group.size() if average else None
    parts = _one_shot if len(slices) == 1 else _two_shot
    return start(parts(bucket, slices, group, codec, divisor, on_part), bucket)


def _one_shot(
    bucket: Tensor,
    slices: tuple[Slice, ...],
    group: ProcessGroup,
    codec: Codec,
    divisor: int | None,
    on_part: OnPart,
) -> Chunk:
    rows = bucket.new_empty(group.size(), slices[0].size, dtype=torch.uint8)
    rows[group.rank()] = encode_slices(bucket, [(0, slices[0])], codec, on_part)
    yield wire.gather(rows, group, async_op=True)
    for part, total in sums(rows, slices[0], codec, bucket.dtype, divisor):
        part.put(total, bucket)


def _two_shot(
    bucket: Tensor,
    slices: tuple[Slice, ...],
    group: ProcessGroup,
    codec: Codec,
    divisor: int | None,
    on_part: OnPart,
) -> Chunk:
    rank = group.rank()
    sent = encode_slices(bucket, list(enumerate(slices)), codec, on_part)
    received = sent.new_empty(group.size(), slices[rank].size)
    yield _exchange(received, sent, slices, group)
    reduced = _reduce_encode(received, slices[rank], rank, codec, bucket.dtype, divisor)
    gathered = reduced.new_zeros(group.size(), max(piece.size for piece in slices))
    gathered[rank, : reduced.numel()] = reduced
    yield wire.gather(gathered, group, async_op=True)
    for index, piece in enumerate(slices):
        for part in piece.parts:
            payload = part.bytes_of(gathered[index])
            if part.exact:
                part.put(_values(payload, bucket.dtype), bucket)
                continue
            compressor = codec(RESULT, index, part.kind)
            rows = payload.contiguous().unsqueeze(0)
            total = compressor.decode_rows(rows, part.numel, torch.float32)[0]
            part.put(_divided(total, divisor), bucket)


def all_gather_changes(
    bucket: Tensor,
    changes: Tensor,
    *,
    slices: tuple[Slice, ...],
    group: ProcessGroup,
    codec: Codec,
    add: bool,
    on_part: OnPart,
) -> Work:
    """Brings every rank's slice of ``bucket`` up to date on all ranks, alike to the bit.

    Args:
        bucket: BF16, FP16 or FP32 [N], the same on all ranks but for the exact parts of this
            rank's own slice, which are new already.
        changes: FP32, as long as this rank's slice: what is to be added to the rest of it, or to
            take its place.
        slices: One a rank, together the whole bucket.
        group: The group, of P ranks.
        codec: See this module.
        add: Add the decoded changes to what is there, in FP32, and round to the bucket's dtype;
            without it they are the new values.
        on_part: Sees the payloads that this rank encoded.

    Returns:
        The handle: ``bucket`` is up to date once its ``wait`` has returned.
    """
    rank = group.rank()
    mine = slices[rank]

    def chunk() -> Chunk:
        largest = max(piece.size for piece in slices)
        rows = bucket.new_zeros(group.size(), largest, dtype=torch.uint8)
        for part in mine.parts:
            values = part.take(bucket) if part.exact else part.shifted(mine.start).take(changes)
            write_part(part, values, rows[rank], codec(RESULT, rank, part.kind), on_part)
        yield wire.gather(rows, group, async_op=True)
        for index, piece in enumerate(slices):
            for part in piece.parts:
                payload = part.bytes_of(rows[index])
                if part.exact:
                    part.put(_values(payload, bucket.dtype), bucket)
                    continue
                compressor = codec(RESULT, index, part.kind)
                coded = payload.contiguous().unsqueeze(0)
                decoded = compressor.decode_rows(coded, part.numel, torch.float32)[0]
                part.put(part.take(bucket).float() + decoded if add else decoded, bucket)

    return start(chunk(), bucket)


def start(chunk: Chunk, bucket: Tensor) -> Work:
    """Starts a collective that is one chunk: returns once its first message is under way.

    Args:
        chunk: Its steps.
        bucket: What it works on.
    """
    with torch.no_grad():
        return Work(Pipeline([chunk], 1), launch.nothing, bucket)


def encode_slices(
    bucket: Tensor, slices: Sequence[tuple[int, Slice]], codec: Codec, on_part: OnPart
) -> Tensor:
    """Returns the messages of slices one after the other: uint8 [sum of sizes].

    Args:
        bucket: FP32, BF16 or FP16 [N].
        slices: Each with its number, in the order in which they are sent.
        codec: See this module.
        on_part: Sees the payloads.
    """
    total = sum(piece.size for _, piece in slices)
    sent = bucket.new_zeros(total, dtype=torch.uint8)
    at = 0
    for index, piece in slices:
        message = sent[at : at + piece.size]
        for part in piece.parts:
            compressor = codec(REDUCE, index, part.kind)
            write_part(part, part.take(bucket), message, compressor, on_part)
        at += piece.size
    return sent


def write_part(
    part: Part, values: Tensor, message: Tensor, compressor: Compressor, on_part: OnPart
) -> None:
    """Writes a part's values [numel] to its place in the message: as they are, or encoded."""
    if part.exact:
        part.bytes_of(message).copy_(values.contiguous().view(torch.uint8))
        return
    payload = part.bytes_of(message).unsqueeze(0)
    compressor.encode_rows(values.unsqueeze(0), out=payload)
    on_part(part.kind, values, payload, compressor)


def _exchange(
    received: Tensor, sent: Tensor, slices: tuple[Slice, ...], group: ProcessGroup
) -> Any:
    """Sends the message of slice r to rank r; uint8 [P, bytes of the own slice] come back."""
    return dist.all_to_all_single(
        received.view(-1),
        sent,
        output_split_sizes=[received.shape[1]] * group.size(),
        input_split_sizes=[piece.size for piece in slices],
        group=group,
        async_op=True,
    )


def sums(
    received: Tensor, piece: Slice, codec: Codec, dtype: torch.dtype, divisor: int | None
) -> Iterator[tuple[Part, Tensor]]:
    """Yields each part of a slice with the FP32 sum of the ranks' messages, uint8 [P, bytes].

    Args:
        received: The messages.
        piece: Their layout.
        codec: See this module.
        dtype: Of the values of exact parts.
        divisor: What the sums are divided by, if by anything.
    """
    for part in piece.parts:
        rows = part.bytes_of(received)
        if part.exact:
            total = _exact_sum(rows, dtype)
        else:
            compressor = codec(REDUCE, 0, part.kind)  # decoding does not depend on the slice
            total = compressor.decode_sum(rows.contiguous(), part.numel)
        yield part, _divided(total, divisor)


def _reduce_encode(
    received: Tensor,
    piece: Slice,
    index: int,
    codec: Codec,
    dtype: torch.dtype,
    divisor: int | None,
) -> Tensor:
    """Sums the ranks' messages of one slice and encodes the sums: uint8 [bytes of the slice]."""
    reduced = received.new_zeros(piece.size)
    for part in piece.parts:
        rows = part.bytes_of(received)
        if part.exact:
            total = _divided(_exact_sum(rows, dtype), divisor)
            part.bytes_of(reduced).copy_(total.to(dtype).view(torch.uint8))
        else:
            compressor = codec(RESULT, index, part.kind)
            payload = compressor.reduce_encode(rows.contiguous(), part.numel)
            part.bytes_of(reduced).copy_(payload)
    return reduced


def _exact_sum(rows: Tensor, dtype: torch.dtype) -> Tensor:
    values = rows.contiguous().view(dtype).float()
    total = values[0].clone()
    for rank in range(1, len(values)):
        total += values[rank]
    return total


def _values(payload: Tensor, dtype: torch.dtype) -> Tensor:
    return payload.contiguous().view(dtype)


def _divided(total: Tensor, divisor: int | None) -> Tensor:
    # Torch divides by a Python number on a GPU as a multiplication by its reciprocal.
    return total if divisor is None else total / torch.full_like(total, divisor)
