"""Products made and sent in token chunks: the same bits, and messages under way meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.training import SP, losses, metrics, train, write_config
from tests.ranks import RankRunner

HIDDEN, INNER, BATCH = 48, 96, 2
PRODUCTS = ("mm", "bmm", "addmm")


class Log(TorchDispatchMode):
    """What was launched, in order: products and messages; and, by ``waits``, what was awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.events.append("product")
        if func.namespace == "c10d" and ("allgather" in name or "alltoall" in name):
            self.events.append("message")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Log the waits of compressed collectives as well."""
        from megatron_taco.collectives.work import Work

        wait = Work.wait

        def logged(work: Any, timeout: Any = None) -> bool:
            if not work.is_completed():
                self.events.append("wait")
            return wait(work, timeout)

        Work.wait = logged  # type: ignore[method-assign]
        try:
            yield
        finally:
            Work.wait = wait  # type: ignore[method-assign]


def megatron(world_size: int) -> Callable[[], None]:
    """Megatron's groups on this rank; returns what takes the CPU shim out again."""
    from megatron_taco.patching.cpu import CpuShim

    shim = CpuShim().install()
    shim.install_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(1)
    return shim.undo


def linear(kind: str, sequence_parallel: bool, dtype: torch.dtype, bias: bool) -> Any:
    """A row- or column-parallel linear of Megatron, the same for the same arguments."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(5)
    common: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": bias}
    if kind == "row":
        return RowParallelLinear(
            INNER, HIDDEN, input_is_parallel=True, skip_bias_add=False, **common
        )
    return ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **common)


def hooks(chunks: int, min_bytes: int = 0) -> tuple[Any, Any]:
    """The registry with the hooks of the tensor-parallel seam, and their counters."""
    from megatron_taco import compressors
    from megatron_taco.collectives.router import Router
    from megatron_taco.patching import tensor
    from megatron_taco.patching.registry import Registry
    from megatron_taco.telemetry.counters import Counters, Flow

    counters = Counters(tensor.all_flows())
    router = Router(
        compressor=compressors.build("taco", block=64),
        algorithm="auto",
        roles=frozenset({"tp.forward", "tp.backward"}),
        min_bytes=min_bytes,
        start_step=0,
        counter=lambda role, collective: counters[Flow(role, collective)],
        sampling=True,
    )
    registry = Registry()
    tensor.TensorParallelHooks(router, chunks).claim(registry)
    return registry, counters


def run_linear(
    kind: str,
    sequence_parallel: bool,
    *,
    tokens: int,
    short: int = 0,
    chunks: int,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    frozen: bool = False,
    transposed: bool = False,
    autocast: bool = False,
    min_bytes: int = 0,
    log: Log | None = None,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Output and gradients of one forward and backward pass, and the counts of its flows.

    There are ``tokens`` for each rank, and ``short`` fewer in all. With a log, of a second pass.
    """
    registry, counters = hooks(chunks, min_bytes)
    world = dist.get_world_size()
    with registry.apply():
        module = linear(kind, sequence_parallel, dtype, bias)
        module.weight.requires_grad_(not frozen)
        scattered = kind == "column" and sequence_parallel
        shape = (
            tokens if scattered else tokens * world - short,
            BATCH,
            HIDDEN if kind == "column" else INNER // world,
        )
        apart = dist.get_rank() if kind == "row" or scattered else 0
        generator = torch.Generator().manual_seed(7 + apart)
        values = torch.randn(shape, generator=generator).to(dtype)
        if transposed:
            values = values.transpose(0, 1).contiguous().transpose(0, 1)
        x = values.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output, _ = module(x)
        output.backward(torch.sin(output.detach()))
        if log is not None:  # the first call may have looked for nodes as well
            with log.waits(), log:
                output, _ = module(x)
                log.events.append("backward")
                output.backward(torch.sin(output.detach()))
    found = [output.detach(), x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]
    flows = {
        str(flow): (count.seen, count.small, count.compressed, count.raw, count.wire, count.largest)
        for flow in counters.flows
        if (count := counters[flow]).seen
    }
    return found, flows


CASES: dict[str, dict[str, Any]] = {
    "row": {"kind": "row", "sequence_parallel": False, "tokens": 12},
    "row, SP": {"kind": "row", "sequence_parallel": True, "tokens": 12},
    "column, SP": {"kind": "column", "sequence_parallel": True, "tokens": 12},
    "column": {"kind": "column", "sequence_parallel": False, "tokens": 12},
    "bias": {"kind": "row", "sequence_parallel": True, "tokens": 12, "bias": True},
    "column bias": {"kind": "column", "sequence_parallel": True, "tokens": 12, "bias": True},
    "frozen row": {"kind": "row", "sequence_parallel": False, "tokens": 12, "frozen": True},
    "frozen column": {"kind": "column", "sequence_parallel": True, "tokens": 12, "frozen": True},
    "strided": {"kind": "row", "sequence_parallel": True, "tokens": 12, "transposed": True},
    "odd": {"kind": "row", "sequence_parallel": False, "tokens": 12, "short": 1},
    "odd, SP": {"kind": "row", "sequence_parallel": True, "tokens": 11},
    "odd column": {"kind": "column", "sequence_parallel": True, "tokens": 11},
    "BF16": {"kind": "row", "sequence_parallel": True, "tokens": 12, "dtype": torch.bfloat16},
}


CASES["autocast"] = {**CASES["BF16"], "autocast": True}
CASES["autocast column"] = {**CASES["autocast"], "kind": "column"}


def equal_in_chunks(rank: int, world_size: int) -> dict[str, list[str]]:
    """Which cases differ from the unchunked linear, in what."""
    undo = megatron(world_size)
    differ: dict[str, list[str]] = {}
    for name, case in CASES.items():
        whole, counted = run_linear(**case, chunks=1)
        for chunks in (2, 5):
            found, flows = run_linear(**case, chunks=chunks)
            same = [torch.equal(a, b) for a, b in zip(whole, found, strict=True)]
            differ.setdefault(name, []).extend(
                f"{chunks} chunks: tensor {index}" for index, ok in enumerate(same) if not ok
            )
            if flows != counted:
                differ[name].append(f"{chunks} chunks: {flows} instead of {counted}")
            if any(tensor.norm() == 0 for tensor in whole):
                differ[name].append("a zero result compares nothing")
    undo()
    return differ


@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_change_no_bit_of_a_linear(run_ranks: RankRunner, ranks: int) -> None:
    """Outputs, gradients and byte counts, two-shot at 4 ranks; chunks of whole blocks.

    In chunks of a few rows the CPU's own products round otherwise, so there are none here.
    """
    for differ in run_ranks(equal_in_chunks, ranks, timeout=120, preload="megatron"):
        assert differ == {name: [] for name in CASES}


def launched(
    rank: int, world_size: int, kind: str, sequence_parallel: bool, chunks: int, min_bytes: int
) -> list[str]:
    undo = megatron(world_size)
    log = Log()
    run_linear(kind, sequence_parallel, tokens=12, chunks=chunks, min_bytes=min_bytes, log=log)
    undo()
    return log.events


def test_a_chunk_travels_while_the_next_is_multiplied(run_ranks: RankRunner) -> None:
    message, product, wait = "message", "product", "wait"
    row = [product, message, product, message, wait, product, message, wait, wait]
    for sequence_parallel in (False, True):
        for events in run_ranks(launched, 2, "row", sequence_parallel, 3, 0, preload="megatron"):
            assert events[: events.index("backward")] == row
    for events in run_ranks(launched, 2, "column", True, 3, 0, preload="megatron"):
        assert events[: events.index("backward")] == [
            *(message, message, wait, product, message, wait, product, wait, product)
        ]  # fmt: skip


def test_backward_messages_are_under_way_during_the_products(run_ranks: RankRunner) -> None:
    """The input gradient travels during the weight gradient's product; SP gathers during dgrad."""
    message, product, wait = "message", "product", "wait"
    for events in run_ranks(launched, 2, "column", False, 1, 0, preload="megatron"):
        assert events[events.index("backward") + 1 :] == [product, message, product, wait]
    for events in run_ranks(launched, 2, "column", True, 1, 0, preload="megatron"):
        assert events[events.index("backward") + 1 :] == [
            *(message, product, wait, message, product, wait)
        ]  # fmt: skip


def test_a_message_below_min_bytes_is_judged_whole_and_not_cut(run_ranks: RankRunner) -> None:
    whole = 24 * BATCH * HIDDEN * 4
    for events in run_ranks(launched, 2, "row", False, 3, whole, preload="megatron"):
        assert events[: events.index("backward")].count("message") == 3
    for events in run_ranks(launched, 2, "row", False, 3, whole + 1, preload="megatron"):
        assert events[: events.index("backward")] == ["product"]


def lost_collective(rank: int, world_size: int) -> str:
    """Megatron's linear without the all-reduce that the chunks belong to."""
    undo = megatron(world_size)
    from megatron.core.tensor_parallel import layers

    from megatron_taco.patching.overlap import OverlapError

    registry, _ = hooks(3)
    message = "no error"
    with registry.apply():
        module = linear("row", False, torch.float32, False)
        kept = layers.reduce_from_tensor_model_parallel_region
        layers.reduce_from_tensor_model_parallel_region = lambda x, group: x
        try:
            module(torch.ones(24, BATCH, INNER // world_size))
        except OverlapError as error:
            message = str(error)
        layers.reduce_from_tensor_model_parallel_region = kept
    undo()
    return message


def test_chunks_that_nobody_asks_for_are_an_error(run_ranks: RankRunner) -> None:
    for text in run_ranks(lost_collective, 2, preload="megatron"):
        assert text == (
            "compression.tensor_parallel.forward_chunks: RowParallelLinear.forward has returned "
            "without the all_reduce that its chunks belong to; set forward_chunks: 1"
        )


def replaced_products(rank: int, world_size: int) -> list[bool]:
    """Whether ``torch.matmul`` of Megatron's linears is ours, without chunks and with."""
    import megatron.core.tensor_parallel.layers as layers

    found = []
    for chunks in (1, 2):
        registry, _ = hooks(chunks)
        with registry.apply():
            found.append(layers.torch.matmul is not torch.matmul)
    return found


def test_without_chunks_no_product_is_replaced(run_ranks: RankRunner) -> None:
    assert run_ranks(replaced_products, 1, preload="megatron") == [[False, True]]


@pytest.mark.parametrize("layout", [(), (SP,)], ids=["plain", "sp"])
def test_training_in_chunks_changes_no_bit(
    run_ranks: RankRunner, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """FP32 losses of 6 steps, chunked, with recomputation on top, against the plain run."""
    config = write_config(tmp_path)
    base = ["megatron.tensor_model_parallel_size=2", "megatron.bf16=false", *layout]
    recompute = (
        "megatron.recompute_granularity=full",
        "megatron.recompute_method=uniform",
        "megatron.recompute_num_layers=1",
    )
    chunked = ["compression.tensor_parallel.forward_chunks=3", *recompute]
    run_ranks(train, 2, config, [*base, *recompute, "run.name=whole"], init=False, timeout=120)
    run_ranks(train, 2, config, [*base, *chunked, "run.name=chunked"], init=False, timeout=120)
    whole, found = losses(tmp_path, "whole"), losses(tmp_path, "chunked")
    assert len(whole) == 6
    assert found == whole
    ends = [
        next(line for line in metrics(tmp_path, name) if line["event"] == "end")["flows"]
        for name in ("whole", "chunked")
    ]
    for flow, counted in ends[0].items():
        for key in ("calls", "compressed", "raw_bytes", "wire_bytes"):
            assert ends[1][flow][key] == counted[key], (flow, key)
