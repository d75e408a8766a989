"""What each NCCL rank of ``test_peer_read_gpu.py`` checks: ``-m tests.gpu.peer_checks``.

The oracle is the one-shot all-reduce: over NCCL, or by the plain-torch compressor on the CPU.
Ranks may share a GPU, where torch is told to allow it, or have one each.
"""

import itertools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import PeerMemory, all_reduce
from megatron_taco.compressors import Taco
from megatron_taco.lab.timing import process_group
from tests.distributed import oracle
from tests.gpu.collective_checks import same

CALLS = 200
LARGE = 16 << 20
"""Elements, BF16, of the memory check."""
SETTINGS = (
    (Taco(), torch.bfloat16, 256 * 48),
    (Taco(), torch.bfloat16, 20_099),
    (Taco("e5m2", 64, "none"), torch.float16, 5_003),
    (Taco("int8", 128, scales="merged_fp32"), torch.float32, 10_002),
    (Taco("int6", 512, scales="merged_bf16"), torch.bfloat16, 9_999),
    (Taco("int4", 32), torch.bfloat16, 4_097),
)


class Checks:
    """The checks of one rank in one group."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank, self.size = group.rank(), group.size()
        self.shared: list[str] = []
        # The ranks are on one host, whatever NCCL is told so that it lets them share a GPU.
        self.peers = PeerMemory("one host")

    def call(self, x: Tensor, taco: Taco, algorithm: str = "peer_read", **options: Any) -> Any:
        """Sums ``x`` in place."""
        return all_reduce(
            x,
            group=self.group,
            compressor=taco,
            algorithm=algorithm,
            peers=self.peers,
            **options,
        )

    def random(self, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Values of this rank on its GPU."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        return torch.randn(numel, generator=generator, device=self.device).to(dtype)

    def values(self) -> None:
        """The bits of the oracle and the same on all ranks; chunks, async; no synchronisation."""
        for taco, dtype, numel in SETTINGS:
            xs = oracle.inputs(self.size, numel, dtype, seed=numel)
            xs[self.size - 1][3] = float("nan")
            xs[0][numel // 2] = float("inf")
            for x in xs:
                x[numel // 3 : numel // 3 + 3 * taco.block] = 0
            wanted = oracle.one_shot(xs, taco.reference())
            x = xs[self.rank].to(self.device)
            self.call(x.clone(), taco)  # maps the memory and compiles
            for chunks, later in itertools.product((None, 1, 3), (False, True)):
                out = x.clone()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    work = self.call(out, taco, chunks=chunks, async_op=later)
                    if work is not None:
                        work.wait()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                what = f"{taco} {dtype} {numel}, {chunks} chunks, async {later}"
                assert same(out, wanted), what
                self.shared.append(oracle.digest(out.cpu()))

    def _back_to_back(self, streams: list[torch.cuda.Stream]) -> None:
        """Many calls of different sizes, the ranks late by turns, streams by turns."""
        taco = Taco()
        sizes = [256, 3_001, 70_000, 256 * 4096, 1_000_003]
        xs = [self.random(sizes[k % 5], torch.bfloat16, k) for k in range(CALLS)]
        wanted = [x.clone() for x in xs]
        for x in wanted:
            self.call(x, taco, "one_shot")
        busy = self.random(1 << 20, torch.bfloat16, CALLS).view(1024, 1024)
        torch.cuda.synchronize()
        for k, x in enumerate(xs):
            with torch.cuda.stream(streams[k % len(streams)]):
                if k % self.size == self.rank:
                    for _ in range(8):
                        busy @ busy
                self.call(x, taco)
        torch.cuda.synchronize()
        wrong = [k for k in range(CALLS) if not oracle.same_bits(xs[k].cpu(), wanted[k].cpu())]
        assert not wrong, f"{len(wanted)} calls on {len(streams)} streams: {wrong} differ"
        self.shared += [oracle.digest(x.cpu()) for x in xs]

    def races(self) -> None:
        """One stream."""
        self._back_to_back([torch.cuda.current_stream()])

    def other_streams(self) -> None:
        """Two streams by turns."""
        self._back_to_back([torch.cuda.Stream(), torch.cuda.Stream()])

    def several_under_way(self) -> None:
        """Async calls, awaited in another order than they were begun, and on another stream."""
        taco = Taco()
        xs = [self.random(40_000 + 77 * k, torch.bfloat16, k) for k in range(5)]
        wanted = [x.clone() for x in xs]
        for x in wanted:
            self.call(x, taco, "one_shot")
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            works = [self.call(x, taco, async_op=True) for x in xs]
        with torch.cuda.stream(streams[1]):
            for work in reversed(works):
                work.wait()
            found = [x.clone() for x in xs]
        torch.cuda.synchronize()
        for x, y in zip(found, wanted, strict=True):
            assert oracle.same_bits(x.cpu(), y.cpu())

    def memory(self) -> None:
        """Less than three times the largest message."""
        taco = Taco()
        x = self.random(LARGE, torch.bfloat16, 0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            self.call(x, taco)
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / (2 * LARGE)
        if self.rank == 0:
            print(f"memory of peer_read: {extra:.2f}", flush=True)
        assert extra < 3, f"{extra:.2f}"

    def graphs_are_refused(self) -> None:
        """By name, and with the group still in order."""
        x = self.random(4096, torch.bfloat16, 0)
        self.call(x.clone(), Taco())
        torch.cuda.synchronize()
        with (
            pytest.raises(RuntimeError, match="peer_read cannot be captured in a CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            self.call(x, Taco())
        wanted = x.clone()
        self.call(wanted, Taco(), "one_shot")
        self.call(x, Taco())
        assert oracle.same_bits(x.cpu(), wanted.cpu())

    def hosts_are_refused(self) -> None:
        """Where each rank is a host of its own for NCCL, as on an emulated link."""
        apart = PeerMemory(f"host {self.rank}")
        with pytest.raises(ValueError, match=f"is on {self.size} hosts"):
            apart.require(self.group, Taco(), self.device)


def main() -> int:
    """Runs all checks; returns 1 if one failed on this rank."""
    with process_group() as (group, device):
        checks = Checks(group, device)
        sections: list[Callable[[], None]] = [
            checks.hosts_are_refused,
            checks.values,
            checks.races,
            checks.other_streams,
            checks.several_under_way,
            checks.memory,
            checks.graphs_are_refused,
        ]
        failed = 0
        for section in sections:
            try:
                section()
            except Exception:
                failed += 1
                traceback.print_exc()
            else:
                if group.rank() == 0:
                    print(f"{section.__name__}: passed", flush=True)
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, checks.shared, group=group)
        if any(shared != checks.shared for shared in everyone):
            failed += 1
            print("the ranks' results differ", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
