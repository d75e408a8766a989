"""What each NCCL rank of ``test_collectives_gpu.py`` checks: ``-m tests.gpu.collective_checks``.

The oracle is the plain-torch compressor on the CPU, in this process.
"""

import itertools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import (
    NodeGroups,
    Topology,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from megatron_taco.compressors import Taco
from megatron_taco.lab.timing import process_group
from tests.distributed import oracle

NODES = {2: [], 3: [], 4: [2], 8: [2, 4]}
"""Numbers of nodes to lay the ranks of a group on."""
LARGE = 16 << 20
"""Elements, BF16, of the memory check."""
COLLECTIVES = ("one_shot", "two_shot", "hierarchical", "reduce_scatter", "all_gather")


def same(found: Tensor, wanted: Tensor) -> bool:
    """Tells whether values are equal to the bit; a GPU's NaN has other bits than a CPU's."""
    found = found.cpu()
    nan = wanted.isnan()
    return torch.equal(found.isnan(), nan) and oracle.same_bits(
        found.masked_fill(nan, 0), wanted.masked_fill(nan, 0)
    )


class Checks:
    """The checks of one rank in one group."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank, self.size = group.rank(), group.size()
        self.shared: list[str] = []
        self.layouts: dict[int, NodeGroups] = {}
        for count in NODES[self.size]:
            name = f"node{self.rank // (self.size // count)}"
            self.layouts[count] = Topology(name).require(group)

    def call(
        self, mode: str, x: Tensor, out: Tensor, taco: Taco, nodes: int | None, **options: Any
    ) -> Any:
        """Starts a collective of ``x``, whose result will be in ``out``."""
        common: dict[str, Any] = {"group": self.group, "compressor": taco, **options}
        if mode == "all_gather":
            return all_gather(out, x, **common)
        if mode == "reduce_scatter":
            return reduce_scatter(out, x, **common)
        out.copy_(x)
        groups = None if nodes is None else self.layouts[nodes]
        return all_reduce(out, algorithm=mode, nodes=groups, **common)

    def output(self, mode: str, x: Tensor) -> Tensor:
        """A tensor for the result, full of what must not stay."""
        factor = {"all_gather": self.size, "reduce_scatter": 1 / self.size}.get(mode, 1)
        return x.new_full((round(x.numel() * factor),), float("nan"))

    def expected(self, mode: str, xs: list[Tensor], taco: Taco, nodes: int | None) -> Tensor:
        reference = taco.reference()
        if mode == "reduce_scatter":
            return oracle.reduce_scatter(xs, self.rank, reference)
        if mode == "hierarchical":
            assert nodes is not None
            each = self.size // nodes
            layout = [list(range(at, at + each)) for at in range(0, self.size, each)]
            return oracle.hierarchical(xs, layout, reference)
        made: dict[str, Callable[[list[Tensor], Taco], Tensor]] = {
            "one_shot": oracle.one_shot,
            "two_shot": oracle.two_shot,
            "all_gather": oracle.all_gather,
        }
        return made[mode](xs, reference)

    def kinds(self) -> list[tuple[str, int | None]]:
        found: list[tuple[str, int | None]] = []
        for mode in COLLECTIVES:
            if mode == "hierarchical":
                found += [(mode, count) for count in self.layouts]
            else:
                found.append((mode, None))
        return found

    def values(self, taco: Taco, numel: int, dtype: torch.dtype) -> None:
        """The oracle's bits: chunked or not, async or not; no synchronisation."""
        xs = oracle.inputs(self.size, numel, dtype, seed=numel)
        xs[self.size - 1][3] = float("nan")
        xs[0][numel // 2] = float("inf")
        for x in xs:
            x[numel // 3 : numel // 3 + 3 * taco.block] = 0
        x = xs[self.rank].to(self.device)
        for mode, nodes in self.kinds():
            wanted = self.expected(mode, xs, taco, nodes)
            for chunks, later in itertools.product((None, 1, 3), (False, True)):
                out = self.output(mode, x)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    work = self.call(mode, x, out, taco, nodes, chunks=chunks, async_op=later)
                    if work is not None:
                        work.wait()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                what = f"{mode} {nodes} nodes, {taco} {dtype} {numel}, {chunks} chunks, {later}"
                assert same(out, wanted), what
                if mode != "reduce_scatter":
                    self.shared.append(oracle.digest(out.cpu()))

    def other_streams(self) -> None:
        """Begun on one stream and ended on another, with the memory in use meanwhile."""
        taco, numel = Taco(), (1 << 18) // self.size * self.size
        xs = oracle.inputs(self.size, numel, torch.bfloat16)
        x = xs[self.rank].to(self.device)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        for mode, nodes in self.kinds():
            wanted = self.expected(mode, xs, taco, nodes)
            with torch.cuda.stream(streams[0]):
                out = self.output(mode, x)
                work = self.call(mode, x, out, taco, nodes, chunks=2, async_op=True)
            with torch.cuda.stream(streams[1]):
                work.wait()
                found = out.clone()
            with torch.cuda.stream(streams[0]):
                # Takes over the collective's buffers, if those were given back too early.
                for _ in range(4):
                    torch.full((numel,), 77, dtype=torch.uint8, device=self.device)
            torch.cuda.synchronize()
            assert same(found, wanted), mode

    def memory(self) -> None:
        """Less than three times the largest message, whatever the number of ranks."""
        taco = Taco()
        for mode, nodes in self.kinds():
            part = LARGE // self.size
            whole = part if mode == "all_gather" else part * self.size
            x = torch.randn(whole, device=self.device).to(torch.bfloat16)
            out = self.output(mode, x)
            for chunks, later in itertools.product((None, 4), (False, True)):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                work = self.call(mode, x, out, taco, nodes, chunks=chunks, async_op=later)
                if work is not None:
                    work.wait()
                torch.cuda.synchronize()
                extra = (torch.cuda.max_memory_allocated() - before) / (2 * LARGE)
                if self.rank == 0:
                    print(f"memory {mode} {nodes} {chunks} {later}: {extra:.2f}", flush=True)
                assert extra < 3, f"{mode}, {chunks} chunks, async {later}: {extra:.2f}"

    def graphs(self) -> None:
        """Captured once and replayed on other values, async or not."""
        taco, numel = Taco(), 3000
        for (mode, nodes), later in itertools.product(self.kinds(), (False, True)):
            x = torch.zeros(numel * self.size, dtype=torch.bfloat16, device=self.device)
            out = self.output(mode, x)

            def run(
                mode: str = mode,
                nodes: int | None = nodes,
                later: bool = later,
                x: Tensor = x,
                out: Tensor = out,
            ) -> None:
                work = self.call(mode, x, out, taco, nodes, chunks=2, async_op=later)
                if work is not None:
                    work.wait()

            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            for seed in (1, 2):
                xs = oracle.inputs(self.size, x.numel(), torch.bfloat16, seed=seed)
                x.copy_(xs[self.rank])
                out.fill_(float("nan"))
                graph.replay()
                wanted = self.expected(mode, xs, taco, nodes)
                assert same(out, wanted), f"{mode} {later} in a graph"


def main() -> int:
    """Runs all checks; returns 1 if one failed on this rank."""
    with process_group() as (group, device):
        checks = Checks(group, device)
        size = group.size()
        sections: list[Callable[[], None]] = [
            lambda: checks.values(Taco(), 256 * size * 12, torch.bfloat16),
            lambda: checks.values(Taco(), 5024 * size, torch.bfloat16),
            checks.other_streams,
            checks.memory,
            checks.graphs,
        ]
        if size == 2:
            int6 = Taco("int6", 128, scales="merged_fp32")
            sections.append(lambda: checks.values(int6, 10_002, torch.float32))
        failed = 0
        for section in sections:
            try:
                section()
            except Exception:
                failed += 1
                traceback.print_exc()
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, checks.shared, group=group)
        if any(shared != checks.shared for shared in everyone):
            failed += 1
            print("the ranks' results differ", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
