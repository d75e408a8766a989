"""Kernels compile before the first step, by sending each kind of message once.

Which kernels a message needs depends on how it is cut, on the algorithm and on addresses; whoever
sends it finds them all.  Ranks compile at the same time: each encodes before it waits for others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from megatron_taco.collectives import measure
from megatron_taco.collectives.router import Router
from megatron_taco.compressors.timed import Timed
from megatron_taco.patching.run_facts import Messages
from megatron_taco.telemetry.counters import FlowCount


def compile_kernels(
    router: Router,
    collectives: Sequence[str],
    messages: Messages,
    group: ProcessGroup,
    device: torch.device,
    *,
    sampling: bool,
) -> str:
    """Send what the run will send, once and compressed; a collective call.

    Args:
        router: knows the compressor and the settings; nothing is counted.
        collectives: the collectives of the roles that are on.
        messages: the run's messages.
        group: the group that sends them.
        device: where they are.
        sampling: whether the codec's error will be sampled.

    Returns:
        What took how long, a line for the console.
    """
    timed = Timed(router.compressor)
    trial = dataclasses.replace(router, compressor=timed)
    clock = measure.clock_of(device)
    start = time.perf_counter()
    for numel in dict.fromkeys((messages.training, messages.evaluation)):
        if numel * messages.dtype.itemsize < router.min_bytes:
            continue
        for collective in collectives:
            output, input = measure.tensors(collective, numel, messages.dtype, device, group.size())
            trial.send_checked(collective, output, input, group)
            if sampling:
                trial.sample(FlowCount(), input)
    clock()  # waits for the device
    seconds = time.perf_counter() - start
    parts = [f"{name} {spent:.1f} s" for name, spent in timed.seconds.items()]
    return f"kernels compiled in {seconds:.1f} s: {', '.join(parts)}"
