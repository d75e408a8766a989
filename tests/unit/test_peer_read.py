"""Peer reads between threads that stand for ranks: no call overtakes another, whoever is slow."""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megatron_taco.collectives import peer_buffer
from megatron_taco.collectives.peer_buffer import PeerBuffer
from megatron_taco.collectives.peer_read import peer_read
from megatron_taco.collectives.peers import RankFacts, group_problem
from megatron_taco.collectives.symmetric import Mapping
from megatron_taco.compressors import Taco
from megatron_taco.compressors.timed import Timed

RANKS = 3
CALLS = 24
CPU = torch.device("cpu")


class SharedMemory:
    """Memory that threads map together, as ranks do theirs."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.mapped: list[Tensor] = [torch.empty(0)] * RANKS

    def of(self, rank: int) -> Callable[[int], Mapping]:
        def map_memory(nbytes: int) -> Mapping:
            mine = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
            self.mapped[rank] = mine
            self.barrier.wait()
            addresses = tuple(memory.data_ptr() for memory in self.mapped)
            self.barrier.wait()
            return Mapping(mine, addresses, lambda: self.barrier.wait() and None)

        return map_memory


class SlowReader(Taco):
    """Reads peers' payloads by address, in some calls late."""

    def decode_sum_peers(self, addresses: Tensor, numel: int, out: Tensor) -> Tensor:
        size = self.payload_bytes(numel)
        if out.sum() % 2 < 1:  # whichever rank that is
            time.sleep(0.005)
        rows = [(ctypes.c_uint8 * size).from_address(at) for at in addresses.tolist()]
        payloads = torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows])
        return self.decode_sum(payloads, numel, out)


def inputs(call: int) -> list[Tensor]:
    """What each rank has in a call; sizes differ, and grow once more half-way."""
    generator = torch.Generator().manual_seed(call)
    numel = (700, 64, 1501)[call % 3] + 1000 * (call >= CALLS // 2)
    return [torch.randn(numel, generator=generator) for _ in range(RANKS)]


def wrong_calls() -> int:
    """The number of results, of all calls and ranks, that are not the sum of that call."""
    shared, taco = SharedMemory(), SlowReader(block=32)

    def rank_calls(rank: int) -> list[Tensor]:
        buffer = PeerBuffer(shared.of(rank), CPU)
        results = []
        for call in range(CALLS):
            flat = inputs(call)[rank].clone()
            for _ in peer_read(flat, buffer, taco, None, False):
                pass
            results.append(flat)
        return results

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(rank_calls, range(RANKS)))
    wrong = 0
    for call in range(CALLS):
        payloads = torch.stack([taco.encode(x) for x in inputs(call)])
        expected = taco.decode_sum(payloads, inputs(call)[0].numel())
        wrong += sum(not torch.equal(found[rank][call], expected) for rank in range(RANKS))
    return wrong


def test_calls_of_all_sizes_back_to_back() -> None:
    assert wrong_calls() == 0


def test_one_slot_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees a payload that was written over too early."""
    monkeypatch.setattr(peer_buffer, "SLOTS", 1)
    assert wrong_calls() > 0


def test_slots_and_growth() -> None:
    asked = []

    def map_memory(nbytes: int) -> Mapping:
        asked.append(nbytes)
        return Mapping(torch.zeros(nbytes, dtype=torch.uint8), (1 << 40, 1 << 41), lambda: None)

    buffer = PeerBuffer(map_memory, CPU)
    slots = [buffer.take(nbytes) for nbytes in (100, 90, 512, 513, 20)]
    assert asked == [2 * 512, 2 * 1024]
    assert [slot.mine.numel() for slot in slots] == [100, 90, 512, 513, 20]
    starts = [(slot.addresses - torch.tensor([1 << 40, 1 << 41])).tolist() for slot in slots]
    assert starts == [[0, 0], [512, 512], [0, 0], [1024, 1024], [0, 0]]
    assert slots[1].mine.data_ptr() - slots[0].mine.data_ptr() == 512


def facts(
    node: str = "a", ordinal: int = 0, *, problem: str | None = None, shares: bool = False
) -> RankFacts:
    return RankFacts(node, problem, ordinal, str(ordinal), shares)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([facts(), facts(ordinal=1)], None),
        ([facts(), facts(problem="its tensors are on cpu")], "rank 1: its tensors are on cpu"),
        ([facts(), facts("b", 1)], "on 2 hosts (host: ranks) 'a': 1, 'b': 1"),
        ([facts(ordinal=2), facts(), facts()], "ranks 1 and 2 both use the device of index 0"),
        ([facts(shares=True), facts()], "ranks 0 and 1 both"),
        ([facts(shares=True), facts(shares=True)], None),
    ],
)
def test_what_a_group_is_refused_for(ranks: list[RankFacts], words: str | None) -> None:
    problem = group_problem(ranks)
    assert (problem is None) if words is None else (problem is not None and words in problem)


def test_compressors_without_kernels_say_why() -> None:
    table, out = torch.zeros(2, dtype=torch.int64), torch.zeros(64)
    for taco in (Taco(), Timed(Taco())):
        assert "there are no kernels on cpu" in str(taco.peer_problem(CPU))
        with pytest.raises(TypeError, match="there are no kernels on cpu"):
            taco.decode_sum_peers(table, 64, out)
    assert "set published_clips: false" in str(Taco(published_clips=True).peer_problem(CPU))
