"""Hooks inside Transformer Engine, on its own Python files (``tests/te_python.py``), over gloo."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_taco import compressors
from megatron_taco.collectives.router import Router
from megatron_taco.telemetry.counters import Counters, Flow
from tests import te_python
from tests.ranks import RankRunner

SOURCE = te_python.source()
needs_source = pytest.mark.skipif(
    SOURCE is None,
    reason="no Python of Transformer Engine here: `make test` unpacks its wheel, or set TE_SOURCE",
)
SEQUENCE, BATCH, HIDDEN, INNER = 32, 2, 64, 128
ALL_REDUCES = {("tp.forward", "all_reduce"): 2, ("tp.backward", "all_reduce"): 2}
# Two column linears gather their input forward and once more backward, two row linears scatter.
SEQUENCE_PARALLEL = {
    ("tp.forward", "all_gather"): 4,
    ("tp.forward", "reduce_scatter"): 2,
    ("tp.backward", "all_gather"): 2,
    ("tp.backward", "reduce_scatter"): 2,
}


class Block(torch.nn.Module):
    """Attention's and the MLP's linears as Megatron's TE layers have them: column, row, twice."""

    def __init__(self, group: Any, sequence_parallel: bool, device: torch.device) -> None:
        super().__init__()
        from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
        from transformer_engine.pytorch.module.linear import Linear

        def weights(tensor: torch.Tensor) -> None:
            generator = torch.Generator().manual_seed(tensor.shape[0] + group.rank())
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) / 8)

        common: dict[str, Any] = {
            "bias": False,
            "tp_group": group,
            "tp_size": group.size(),
            "sequence_parallel": sequence_parallel,
            "params_dtype": torch.float32,
            "device": device,
            "init_method": weights,
        }
        row = {**common, "parallel_mode": "row"}
        column = {**common, "parallel_mode": "column"}
        self.layers = torch.nn.ModuleList(
            [
                LayerNormLinear(HIDDEN, INNER, normalization="RMSNorm", **column),
                Linear(INNER, HIDDEN, **row),
                Linear(HIDDEN, INNER, **column),
                Linear(INNER, HIDDEN, **row),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_block(group: Any, sequence_parallel: bool, device: torch.device) -> list[torch.Tensor]:
    """One forward and backward pass: output, gradients of the input and of every parameter."""
    rows = SEQUENCE // group.size() if sequence_parallel else SEQUENCE
    generator = torch.Generator().manual_seed(7 + (group.rank() if sequence_parallel else 0))
    x = torch.randn(rows, BATCH, HIDDEN, generator=generator).to(device).requires_grad_()
    block = Block(group, sequence_parallel, device)
    y = block(x)
    (y * y).sum().backward()
    with torch.no_grad():
        evaluated = block(x)
    gradients = [p.grad for p in (x, *block.parameters())]
    assert all(g is not None for g in gradients)
    assert torch.equal(evaluated, y)
    return [y.detach(), *[g for g in gradients if g is not None]]


def hooks_of(counters: Counters, on: bool) -> Any:
    from megatron_taco.patching.tensor import TensorParallelHooks
    from megatron_taco.patching.transformer_engine import TransformerEngineHooks

    router = Router(
        compressor=compressors.build("taco", format="int8", block=64),
        algorithm="auto",
        roles=frozenset({"tp.forward", "tp.backward"} if on else ()),
        min_bytes=0,
        start_step=0,
        counter=lambda role, collective: counters[Flow(role, collective)],
    )
    return TransformerEngineHooks(TensorParallelHooks(router))


def on_a_rank(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """What is found on the CPU, with Transformer Engine's Python alone."""
    te_python.load(root)
    return look(torch.device("cpu"))


def look(device: torch.device) -> dict[str, Any]:
    """Run the block without hooks, with hooks and roles off, and with roles on; SP off and on."""
    from megatron.core import parallel_state
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.module import base, layernorm_linear, linear

    from megatron_taco.patching.registry import Registry
    from megatron_taco.patching.te_targets import TE_TARGETS
    from megatron_taco.patching.tensor import all_flows

    names = ("allreduce", "reduce_scatter_along_first_dim", "gather_along_first_dim")
    places = [
        (module, name)
        for module in (distributed, linear, layernorm_linear, base)
        for name in names
        if hasattr(module, name)
    ]
    native = [getattr(*place) for place in places]
    world_size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    group = parallel_state.get_tensor_model_parallel_group()
    found: dict[str, Any] = {}
    for sequence_parallel in (False, True):
        plain = run_block(group, sequence_parallel, device)
        results = {}
        for on in (False, True):
            counters = Counters(all_flows())
            registry = Registry()
            hooks_of(counters, on).claim(registry)
            with registry.apply():
                assert all(getattr(*p) is not n for p, n in zip(places, native, strict=True))
                results[on] = run_block(group, sequence_parallel, device)
                outside = gathered_without_a_layer(group, counters, device)
            assert all(getattr(*p) is n for p, n in zip(places, native, strict=True))
            assert {t.name for t in TE_TARGETS} == registry.hits.keys()
            flows = {key: counters[Flow(*key)] for key in _keys()}
            found[f"{sequence_parallel}/{on}"] = {
                "seen": Counter({k: c.seen for k, c in flows.items() if c.seen}),
                "compressed": Counter({k: c.compressed for k, c in flows.items() if c.compressed}),
                "ratio": sum(c.wire for c in flows.values()) / sum(c.raw for c in flows.values()),
                "outside": outside,
                "never_hit": registry.never_hit(),
            }
        assert all(torch.equal(a, b) for a, b in zip(plain, results[False], strict=True))
        found[f"{sequence_parallel}/errors"] = [
            float((a - b).norm() / a.norm()) for a, b in zip(plain, results[True], strict=True)
        ]
        copies = [torch.empty_like(results[True][0]) for _ in range(world_size)]
        dist.all_gather(copies, results[True][0])
        found[f"{sequence_parallel}/same"] = all(torch.equal(copies[0], copy) for copy in copies)
    return found


def _keys() -> list[tuple[str, str]]:
    return [
        (role, collective)
        for role in ("tp.forward", "tp.backward")
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
    ]


def gathered_without_a_layer(group: Any, counters: Counters, device: torch.device) -> bool:
    """Whether a gather outside any layer, and one with a quantizer inside, stay uncounted."""
    from transformer_engine.pytorch.module import linear

    from megatron_taco.patching.transformer_engine import TransformerEngineHooks

    before = [counters[Flow(*key)].seen for key in _keys()]
    x = torch.full((4, 64), float(group.rank()), device=device)
    whole, _ = linear.gather_along_first_dim(x, group)
    asked: list[Any] = []

    def quantised(inp: Any, group: Any, async_op: bool, quantizer: Any) -> Any:
        asked.append(quantizer)
        return inp, None

    hooks = hooks_of(counters, on=True)
    with hooks._hooks.scope.function("linear", {"all_gather": "forward"}):
        hooks._all_gather(quantised, lambda: None)(x, group, quantizer="fp8")
    assert isinstance(hooks, TransformerEngineHooks)
    exact = torch.equal(whole[::4, 0].cpu(), torch.arange(group.size(), dtype=torch.float32))
    return exact and asked == ["fp8"] and before == [counters[Flow(*k)].seen for k in _keys()]


@needs_source
def test_every_collective_of_its_linears_has_its_role(run_ranks: RankRunner) -> None:
    """Forward and backward, SP off and on: roles, bits, bytes, and what is left alone."""
    for rank in run_ranks(on_a_rank, 2, SOURCE, preload="megatron", timeout=240):
        judge(rank)


def judge(rank: dict[str, Any]) -> None:
    """Assert what has to hold of one rank's findings."""
    for sequence_parallel, expected in (("False", ALL_REDUCES), ("True", SEQUENCE_PARALLEL)):
        off, on = rank[f"{sequence_parallel}/False"], rank[f"{sequence_parallel}/True"]
        # The evaluation pass under no_grad adds the forward collectives once more.
        again = {("tp.forward", "all_reduce"), ("tp.forward", "reduce_scatter")}
        counts = Counter(expected)
        counts.update({key: 2 for key in counts if key in again})
        if sequence_parallel == "True":
            counts["tp.forward", "all_gather"] += 2
        assert off["seen"] == on["seen"] == on["compressed"] == counts
        assert not off["compressed"]
        assert off["ratio"] == 1
        assert on["ratio"] < 0.3  # FP32 as INT8, and a scale a block of 64
        assert off["outside"]
        assert on["outside"]
        unused = {"tensor.te.all_reduce"}
        if sequence_parallel == "False":
            unused = {"tensor.te.reduce_scatter", "tensor.te.all_gather"}
        assert set(on["never_hit"]) == unused
        errors = rank[f"{sequence_parallel}/errors"]
        assert all(0 < error < 0.05 for error in errors), errors
    assert rank["False/same"], "every rank holds the same output"


@needs_source
def test_known_sources_cover_this_release() -> None:
    from megatron_taco.patching.fingerprints import SourceFiles, known
    from megatron_taco.patching.inspection import inspect_target, module_path, package_version
    from megatron_taco.patching.te_targets import TE_TARGETS

    assert SOURCE is not None
    version = package_version("transformer_engine", SOURCE)
    stored = known("transformer_engine")
    for target in TE_TARGETS:
        path = module_path(SOURCE, target.module)
        finding = inspect_target(target, path, version, stored, SourceFiles())
        assert (finding.status, finding.like) == ("ok", version), finding
