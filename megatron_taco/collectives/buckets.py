"""Collectives of data-parallel buckets: reduce-scatter, all-reduce, all-gather of differences.

As the collectives of tensors (``all_reduce.py`` and its neighbours), but of a flat bucket in which
kinds of parameters are encoded apart and some go exactly (``segments.py``). All sums are of decoded
values, in FP32, in rank order, rounded to the bucket's dtype once; every rank decodes the same
bytes, its own included.

A *codec* names the compressor of one message: ``codec(direction, slice, kind)``, so that random
rounding can depend on what is sent; compressors without it are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import wire
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
    with torch.no_grad():
        sent = _encode_slices(bucket, slices, codec, on_part)
        received, handle = _exchange(sent, slices, group)
    mine = slices[group.rank()]

    def finish() -> None:
        for part, total in _sums(received, mine, group, codec, output.dtype, average):
            # The part's places count from the bucket's start, the output's from the slice's.
            _shifted(part, mine.start).put(total, output)

    return Work(handle, finish, sent, received)


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
    with torch.no_grad():
        sent = _encode_slices(bucket, slices, codec, on_part)
        if len(slices) == 1:
            received, handle = wire.gather(sent, group, async_op=True)
        else:
            received, handle = _exchange(sent, slices, group)

    def finish_one_shot() -> None:
        for part, total in _sums(received, slices[0], group, codec, bucket.dtype, average):
            part.put(total, bucket)

    def finish_two_shot() -> None:
        rank = group.rank()
        reduced = _reduce_encode(received, slices[rank], rank, group, codec, bucket.dtype, average)
        largest = max(piece.size for piece in slices)
        padded = reduced.new_zeros(largest)
        padded[: reduced.numel()] = reduced
        gathered, _ = wire.gather(padded, group, async_op=False)
        for index, piece in enumerate(slices):
            for part in piece.parts:
                payload = part.bytes_of(gathered[index])
                if part.exact:
                    part.put(_values(payload, bucket.dtype), bucket)
                    continue
                compressor = codec(RESULT, index, part.kind)
                rows = payload.contiguous().unsqueeze(0)
                total = compressor.decode_rows(rows, part.numel, torch.float32)[0]
                part.put(_mean(total, group, average), bucket)

    finish = finish_one_shot if len(slices) == 1 else finish_two_shot
    return Work(handle, finish, sent, received)


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
    with torch.no_grad():
        message = bucket.new_zeros(max(piece.size for piece in slices), dtype=torch.uint8)
        for part in mine.parts:
            if part.exact:
                _write_exact(part, part.take(bucket), message)
            else:
                values = _shifted(part, mine.start).take(changes)
                _write_encoded(part, values, message, codec(RESULT, rank, part.kind), on_part)
        gathered, handle = wire.gather(message, group, async_op=True)

    def finish() -> None:
        for index, piece in enumerate(slices):
            for part in piece.parts:
                payload = part.bytes_of(gathered[index])
                if part.exact:
                    part.put(_values(payload, bucket.dtype), bucket)
                    continue
                rows = payload.contiguous().unsqueeze(0)
                compressor = codec(RESULT, index, part.kind)
                decoded = compressor.decode_rows(rows, part.numel, torch.float32)[0]
                part.put(part.take(bucket).float() + decoded if add else decoded, bucket)

    return Work(handle, finish, message, gathered)


def _encode_slices(
    bucket: Tensor, slices: tuple[Slice, ...], codec: Codec, on_part: OnPart
) -> Tensor:
    """Returns the messages of all slices one after the other: uint8 [sum of sizes]."""
    total = sum(piece.size for piece in slices)
    sent = bucket.new_zeros(total, dtype=torch.uint8)
    at = 0
    for index, piece in enumerate(slices):
        message = sent[at : at + piece.size]
        for part in piece.parts:
            values = part.take(bucket)
            if part.exact:
                _write_exact(part, values, message)
            else:
                compressor = codec(REDUCE, index, part.kind)
                _write_encoded(part, values, message, compressor, on_part)
        at += piece.size
    return sent


def _write_exact(part: Part, values: Tensor, message: Tensor) -> None:
    part.bytes_of(message).copy_(values.contiguous().view(torch.uint8))


def _write_encoded(
    part: Part, values: Tensor, message: Tensor, compressor: Compressor, on_part: OnPart
) -> None:
    payload = part.bytes_of(message).unsqueeze(0)
    compressor.encode_rows(values.unsqueeze(0), out=payload)
    on_part(part.kind, values, payload, compressor)


def _exchange(sent: Tensor, slices: tuple[Slice, ...], group: ProcessGroup) -> tuple[Tensor, Any]:
    """Sends the message of slice r to rank r; returns uint8 [P, bytes of the own slice], handle."""
    mine = slices[group.rank()].size
    received = sent.new_empty(group.size() * mine)
    handle = dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=[mine] * group.size(),
        input_split_sizes=[piece.size for piece in slices],
        group=group,
        async_op=True,
    )
    return received.view(group.size(), mine), handle


def _sums(
    received: Tensor,
    piece: Slice,
    group: ProcessGroup,
    codec: Codec,
    dtype: torch.dtype,
    average: bool,
) -> Iterable[tuple[Part, Tensor]]:
    """Yields each part of a slice with its FP32 sum, or mean, over the ranks' messages."""
    for part in piece.parts:
        rows = part.bytes_of(received)
        if part.exact:
            total = _exact_sum(rows, dtype)
        else:
            compressor = codec(REDUCE, 0, part.kind)  # decoding does not depend on the slice
            total = compressor.decode_sum(rows.contiguous(), part.numel)
        yield part, _mean(total, group, average)


def _reduce_encode(
    received: Tensor,
    piece: Slice,
    index: int,
    group: ProcessGroup,
    codec: Codec,
    dtype: torch.dtype,
    average: bool,
) -> Tensor:
    """Sums the ranks' messages of one slice and encodes the sums: uint8 [bytes of the slice]."""
    reduced = received.new_zeros(piece.size)
    for part in piece.parts:
        rows = part.bytes_of(received)
        if part.exact:
            total = _mean(_exact_sum(rows, dtype), group, average)
            _write_exact(part, total.to(dtype), reduced)
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


def _mean(total: Tensor, group: ProcessGroup, average: bool) -> Tensor:
    # Torch divides by a Python number on a GPU as a multiplication by its reciprocal.
    return total / torch.full_like(total, group.size()) if average else total


def _shifted(part: Part, start: int) -> Part:
    spans = tuple((first - start, last - start) for first, last in part.spans)
    return Part(part.kind, part.exact, spans, part.numel, part.offset, part.used)
