"""The router: what goes plain and why, that new settings are seen, what a plain call costs."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_taco import compressors
from megatron_taco.collectives.policy import Measured, Policy
from megatron_taco.collectives.router import Message, Router
from megatron_taco.telemetry.counters import Counters, Flow

FORWARD = Flow("tp.forward", "all_reduce")
GATHER = Flow("tp.forward", "all_gather")


class PairOfRanks:
    """Stands for a process group that nothing is sent on."""

    @staticmethod
    def size() -> int:
        return 2


GROUP: Any = PairOfRanks()
KIB = torch.zeros(512, dtype=torch.bfloat16)


class Recorded(Router):
    """A router whose compressed calls send nothing."""

    def send(self, *args: Any) -> Any:
        return "compressed"


def make_router(counters: Counters, policy: Policy | None = None) -> Router:
    return Recorded(
        compressor=compressors.build("taco", format="e4m3", block=256),
        algorithm="one_shot",
        roles=frozenset({"tp.forward"}),
        min_bytes=1024,
        start_step=0,
        counter=lambda role, collective: counters[Flow(role, collective)],
        policy=policy,
    )


def decide(compress: bool) -> Policy:
    times = {"plain_s": 2.0, "compressed_s": 1.0} if compress else {"plain_s": 1, "compressed_s": 2}
    item = Measured(
        role="tp.forward", collective="all_reduce", nbytes=1024, raw=1024, wire=528, **times
    )
    return Policy((item.decided(),), {})


def call(router: Router, tensor: torch.Tensor = KIB, role: str = "tp.forward") -> Any:
    return router.all_reduce(role, tensor, GROUP, False, lambda: "plain")


def test_why_a_call_goes_plain() -> None:
    flows = [FORWARD, GATHER, Flow("tp.embedding", "all_reduce")]
    counters = Counters(flows)
    router = make_router(counters, decide(True))
    assert call(router) == "compressed"
    assert call(router, KIB[:511]) == "plain"
    assert call(router, role="tp.embedding") == "plain"
    router.start_step, router.step = 3, 2
    assert call(router) == "plain"
    router.step = 3
    assert call(router) == "compressed"
    router.policy = decide(False)
    assert call(router) == "plain"
    assert call(router, KIB[:511]) == "plain"
    count = counters[FORWARD]
    assert (count.seen, count.compressed, count.small, count.by_policy) == (6, 2, 2, 1)
    assert count.largest == 1024
    assert count.raw == 4 * 1024 + 2 * 1022
    assert count.wire == 2 * 528 + 2 * 1024 + 2 * 1022
    assert counters[flows[2]].seen == 1
    assert router.messages == (
        Message("tp.forward", "all_reduce", 512, 2, GROUP),
        Message("tp.forward", "all_reduce", 511, 2, GROUP),
    )


def test_an_all_gather_counts_with_its_whole_output() -> None:
    counters = Counters([GATHER])
    router = make_router(counters)
    half = KIB[:256]
    assert router.all_gather("tp.forward", KIB, half, GROUP, True, lambda: "plain") == "compressed"
    assert counters[GATHER].largest == 1024


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("roles", frozenset(), "plain"),
        ("min_bytes", 1025, "plain"),
        ("policy", decide(False), "plain"),
        ("sampling", False, "compressed"),
    ],
)
def test_new_settings_count_from_the_next_call(name: str, value: Any, expected: str) -> None:
    router = make_router(Counters([FORWARD]))
    assert call(router) == "compressed"
    setattr(router, name, value)
    assert call(router) == expected


def host_seconds(run: Callable[[], Any], calls: int = 2000) -> float:
    """Least mean over a few batches: what else runs on the machine only adds."""

    def batch() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls

    return min(batch() for _ in range(5))


def test_a_plain_call_costs_the_host_microseconds() -> None:
    """The bar is 20 µs; on a CPU, where nothing else of the call costs, too."""
    router = make_router(Counters([FORWARD]), decide(False))

    def plain() -> None:
        return None

    routed = host_seconds(lambda: router.all_reduce("tp.forward", KIB, GROUP, False, plain))
    assert routed - host_seconds(plain) < 20e-6
