"""Kernels compile before the first step, on every rank for itself, for the run's messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.distributed import ProcessGroup

from megatron_taco.collectives import measure
from megatron_taco.collectives.router import Router
from megatron_taco.collectives.shapes import encoded_elements, warm_up_shapes
from megatron_taco.patching.run_facts import Messages


def compile_kernels(
    router: Router,
    collectives: Sequence[str],
    messages: Messages,
    group: ProcessGroup,
    device: torch.device,
    *,
    sampling: bool,
) -> str | None:
    """Compile all that the run's compressed messages need; a collective call.

    First every rank compiles by itself, so that the ranks do it at the same time.  Then each
    collective runs once on a message of the run's size, for what depends on addresses and on how a
    message is cut.

    Args:
        router: knows the compressor and the settings.
        collectives: the collectives of the roles that are on.
        messages: the run's messages.
        group: the group that sends them.
        device: where they are.
        sampling: whether the codec's error will be sampled.

    Returns:
        A line for the console, or None where nothing is compiled, as on CPUs.
    """
    compressor = router.compressor
    start = time.perf_counter()
    sizes = [
        numel
        for numel in dict.fromkeys((messages.training, messages.evaluation))
        if numel * messages.dtype.itemsize >= router.min_bytes
    ]
    sent = [(collective, numel) for collective in collectives for numel in sizes]
    shapes = [
        shape
        for collective, numel in sent
        for shape in warm_up_shapes(
            collective, numel, group.size(), algorithm=router.algorithm, block=compressor.block
        )
    ]
    lines = compressor.warm_up(list(dict.fromkeys(shapes)), [messages.dtype], device)
    if not lines:
        return None
    if sampling:
        elements = {encoded_elements(name, numel, group.size()) for name, numel in sent}
        lines.append(_timed("error samples", partial(_sample, router, elements, messages, device)))
    lines.append(_timed("first messages", partial(_send, router, sent, messages, group, device)))
    return f"kernels compiled in {time.perf_counter() - start:.1f} s: {', '.join(lines)}"


def _timed(name: str, call: Callable[[], None]) -> str:
    start = time.perf_counter()
    call()
    return f"{name}: {time.perf_counter() - start:.2f} s"


def _sample(router: Router, sizes: set[int], messages: Messages, device: torch.device) -> None:
    for numel in sizes:
        exact = torch.zeros(numel, dtype=messages.dtype, device=device)
        router.compressor.decode(router.compressor.encode(exact), (numel,), torch.float32)


def _send(
    router: Router,
    sent: Sequence[tuple[str, int]],
    messages: Messages,
    group: ProcessGroup,
    device: torch.device,
) -> None:
    for collective, numel in sent:
        output, input = measure.tensors(collective, numel, messages.dtype, device, group.size())
        router.send_checked(collective, output, input, group)
    measure.clock_of(device)()  # wait, so that the time is that of the messages
