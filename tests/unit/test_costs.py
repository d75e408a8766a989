"""What compression costs: nested times, buffers of messages, the end table."""

from __future__ import annotations

import io
import time

import pytest
import torch

from megatron_taco.collectives.segments import Run
from megatron_taco.collectives.traffic import buffer_bytes
from megatron_taco.compressors import BlockInteger, Taco
from megatron_taco.patching.data_plans import GRADIENTS, Plan, Stream
from megatron_taco.telemetry.console import make_console
from megatron_taco.telemetry.costs import Cost, cost_table, records


class Handle:
    waited = False

    def wait(self) -> bool:
        time.sleep(0.02)
        self.waited = True
        return True

    def is_completed(self) -> bool:
        return self.waited


def test_a_call_within_a_call_counts_once_and_waiting_counts() -> None:
    cost = Cost("axis")
    start = time.perf_counter()
    with cost.timed(), cost.timed():
        time.sleep(0.02)
    assert cost.host_s <= time.perf_counter() - start
    assert cost.host_s >= 0.02
    before = cost.host_s
    handle = cost.watched(Handle())
    assert not handle.is_completed()
    assert handle.wait() is True
    assert handle.is_completed()
    assert cost.host_s >= before + 0.02
    assert cost.watched(None) is None


def test_the_largest_call_is_what_counts() -> None:
    cost = Cost("compression.data_parallel", state=lambda: 2**20)
    for size in (100, 3 * 2**20, 50):
        cost.called(size)
    cost.host_s = 0.5
    unused = Cost("compression.tensor_parallel")
    axes = [unused.axis, cost.axis]
    found = records(axes, [*unused.numbers(), *cost.numbers()], steps=10)
    assert found == {
        "compression.data_parallel": {
            "state_bytes": 2**20,
            "buffer_bytes": 3 * 2**20,
            "host_ms_per_step": 50.0,
        }
    }
    stream = io.StringIO()
    make_console(stream).print(cost_table(found))
    assert all(text in stream.getvalue() for text in ("1 MiB", "3 MiB", "50.0"))


@pytest.mark.parametrize("size", [2, 4])
def test_buffers_are_what_the_messages_take(size: int) -> None:
    code, numel = Taco("e4m3", 64), 64 * 40
    row = code.encode_rows(torch.zeros(1, numel)).numel()
    part = code.encode_rows(torch.zeros(1, numel // size)).numel()
    for op, algorithm, wanted in (
        ("all_reduce", "one_shot", size * row),
        ("all_reduce", "peer_read", 2 * row),
        ("all_reduce", "two_shot", 3 * size * part),
        ("reduce_scatter", "", 2 * size * part),
        ("all_gather", "", size * part),
    ):
        found = buffer_bytes(op, algorithm, numel, size, code.payload_bytes, block=64)
        assert found == wanted, op

    stream = Stream(
        role=GRADIENTS,
        compressor=BlockInteger(4, 128, 32, "bf16"),
        exclude=frozenset(),
        min_bytes=0,
        start_step=0,
    )
    plan = Plan("b", (Run(0, 1000, "mlp"), Run(1000, 1024, "norm")), 1024, stream, 4)
    pieces = plan.slices(size, equal=True)
    sizes = [piece.size for piece in pieces]
    assert plan.buffer_bytes("all_gather", 0, size) == size * max(sizes)
    assert plan.buffer_bytes("reduce_scatter", 1, size) == sum(sizes) + size * sizes[1]
