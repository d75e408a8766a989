"""What `auto` costs where it chose plain: little host time, and nothing on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_taco import compressors
from megatron_taco.collectives.policy import Measured, Policy
from megatron_taco.collectives.router import Router
from megatron_taco.patching.tensor import TensorParallelHooks
from megatron_taco.telemetry.counters import Counters, Flow

pytestmark = pytest.mark.gpu


class PairOfRanks:
    """Stands for a process group that nothing is sent on."""

    @staticmethod
    def size() -> int:
        return 2


GROUP: Any = PairOfRanks()
BAR_US = 20.0


def hooks_that_go_plain(nbytes: int) -> TensorParallelHooks:
    item = Measured(
        role="tp.forward", collective="all_reduce", nbytes=nbytes, raw=nbytes, wire=nbytes // 2,
        plain_s=1e-3, compressed_s=2e-3,
    )  # fmt: skip
    counters = Counters([Flow("tp.forward", "all_reduce")])
    hooks = TensorParallelHooks(
        Router(
            compressor=compressors.build("taco", format="e4m3", block=256),
            algorithm="one_shot",
            roles=frozenset({"tp.forward"}),
            min_bytes=0,
            start_step=0,
            counter=lambda role, collective: counters[Flow(role, collective)],
            policy=Policy((item.decided(),), {}),
        )
    )
    hooks._group = GROUP  # what Megatron's parallel state would answer
    return hooks


def host_us(run: Callable[[], Any], calls: int = 2000) -> float:
    def batch() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls * 1e6

    return min(batch() for _ in range(5))


def test_plain_by_policy_costs_no_device_work_and_little_host_time() -> None:
    """From Megatron's call to the original: finding the role, the group, the decision, counting."""
    tensor = torch.ones(2048, 1, 1024, dtype=torch.bfloat16, device="cuda")
    hooks = hooks_that_go_plain(tensor.nbytes)
    calls = [0]

    def original(
        tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: Any = 0
    ) -> None:
        calls[0] += 1

    routed = hooks._all_reduce(original, lambda: None)
    scope = hooks.scope
    with scope.module("linear"), scope.function("linear", {"all_reduce": "forward"}):

        def through_us() -> None:
            routed(tensor, group=GROUP)

        through_us()
        with torch.profiler.profile(
            activities=[
                torch.profiler.ProfilerActivity.CPU,
                torch.profiler.ProfilerActivity.CUDA,
            ]
        ) as profile:
            tensor.add_(1)  # so that an empty profile is not taken for an idle device
            torch.cuda.synchronize()
            begin = torch.cuda.memory_stats()["allocation.all.allocated"]
            for _ in range(10):
                through_us()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == begin
            torch.cuda.synchronize()
        on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(on_device) == 1, [event.name for event in on_device]
        assert [e.name for e in profile.events() if e.name.startswith("aten::")] == ["aten::add_"]
        extra = host_us(through_us) - host_us(lambda: original(tensor, group=GROUP))
    assert calls[0] > 10
    print(f"host time of a call that goes plain: {extra:.2f} µs")
    assert extra < BAR_US
