"""Compressed all-reduce, by one or by two exchanges of encoded bytes.

One-shot: every rank sends its encoded tensor to all others and sums what it decodes. One lossy
step, one collective, (P-1)·N bytes.

Two-shot (the default of TACO's released code): the tensor is cut into P slices. An all-to-all
brings slice ``r`` of every rank to rank ``r``, which decodes, sums in FP32 in rank order and
encodes the sum again; an all-gather hands the encoded sums out. Two lossy steps, two collectives,
2(P-1)/P·N bytes.

In both everyone decodes the same bytes, the owner of a slice included, so all ranks end with
bit-identical values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import checks, wire
from megatron_taco.collectives.traffic import slice_elements
from megatron_taco.collectives.work import Work
from megatron_taco.compressors import Compressor

OnPayload = Callable[[Tensor, int], None]
"""Called with the payloads that this rank encoded, ``uint8 [R, b]``, and the elements per row."""


def choose_algorithm(world_size: int, algorithm: str) -> str:
    """Returns the all-reduce algorithm: what is asked for, or the choice of ``auto``.

    At P = 2 both send the same number of bytes, and one-shot has one lossy step and one
    collective fewer; above, two-shot sends fewer bytes.

    Args:
        world_size: Number of ranks of the group, P.
        algorithm: ``auto``, ``one_shot`` or ``two_shot``.

    Returns:
        ``one_shot`` or ``two_shot``.

    Raises:
        ValueError: ``algorithm`` is something else.
    """
    if algorithm == "auto":
        return "one_shot" if world_size <= 2 else "two_shot"
    if algorithm not in ("one_shot", "two_shot"):
        raise ValueError(f"algorithm: got {algorithm!r}, allowed: auto, one_shot, two_shot")
    return algorithm


def all_reduce(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    compressor: Compressor,
    algorithm: str = "auto",
    async_op: bool = False,
    on_payload: OnPayload | None = None,
) -> Work | None:
    """Sums ``tensor`` over the ranks of ``group``, in place.

    Args:
        tensor: FP32, BF16 or FP16, of any shape and strides; the same shape and dtype on all
            ranks. The sum is made in FP32 and rounded to this dtype once.
        group: The process group.
        compressor: Encodes what is sent.
        algorithm: ``auto``, ``one_shot`` or ``two_shot``: see :func:`choose_algorithm`.
        async_op: Return a handle; the result is in ``tensor`` once its ``wait`` has returned.
            Until then ``tensor`` may be read but not written: it is encoded already.
        on_payload: Sees the payloads that this rank encoded.

    Returns:
        The handle if ``async_op``, else None.

    Raises:
        TypeError: The dtype cannot be compressed, or ``group`` is not a group of this rank.
        ValueError: ``algorithm`` is unknown, or the tensor is sparse.
    """
    size = checks.group_size(group)
    checks.check_tensor("tensor", tensor, size)
    chosen = choose_algorithm(size, algorithm)
    if size == 1 or tensor.numel() == 0:
        return Work.done() if async_op else None
    start = _one_shot if chosen == "one_shot" else _two_shot
    with torch.no_grad():
        work = start(tensor, group, compressor, async_op, on_payload)
    if async_op:
        return work
    work.wait()
    return None


def _one_shot(
    tensor: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    async_op: bool,
    on_payload: OnPayload | None,
) -> Work:
    numel = tensor.numel()
    payload = compressor.encode(tensor.detach())
    if on_payload is not None:
        on_payload(payload.view(1, -1), numel)
    gathered, handle = wire.gather(payload, group, async_op)

    def finish() -> None:
        total = compressor.decode_sum(gathered, numel)
        tensor.detach().copy_(total.view(tensor.shape))

    return Work(handle, finish, payload, gathered)


def _two_shot(
    tensor: Tensor,
    group: ProcessGroup,
    compressor: Compressor,
    async_op: bool,
    on_payload: OnPayload | None,
) -> Work:
    numel, size = tensor.numel(), group.size()
    width = slice_elements(numel, size, compressor.block)
    flat = tensor.detach().reshape(-1)
    if numel < size * width:
        padded = flat.new_zeros(size * width)
        padded[:numel] = flat
        flat = padded
    payloads = compressor.encode_rows(flat.view(size, width))
    if on_payload is not None:
        on_payload(payloads, width)
    received, handle = wire.exchange(payloads, group, async_op)

    def finish() -> None:
        reduced = compressor.reduce_encode(received, width)
        gathered, _ = wire.gather(reduced, group, async_op=False)
        rows = compressor.decode_rows(gathered, width, tensor.dtype)
        tensor.detach().copy_(rows.view(-1)[:numel].view(tensor.shape))

    return Work(handle, finish, payloads, received)
