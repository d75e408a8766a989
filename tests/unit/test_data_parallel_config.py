"""`compression.data_parallel`: what it becomes, and what is refused, line and key named."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from torch.distributed import ProcessGroup

from megatron_taco.compressors import BlockInteger, Taco
from megatron_taco.config import Config, ConfigError, load
from megatron_taco.config.gradient_methods import METHOD_SETTINGS
from megatron_taco.gradients import METHODS
from megatron_taco.gradients.cd_adam import CDAdam
from megatron_taco.gradients.sparseloco import SparseLoCo
from megatron_taco.patching import conflicts, data_conflicts
from megatron_taco.patching.data import DataParallelHooks
from megatron_taco.patching.data_flows import all_flows, expected_flows
from megatron_taco.patching.data_session import data_parallel_checks, data_parallel_hooks
from megatron_taco.patching.flows import FlowCheckError
from megatron_taco.telemetry.counters import Counters, Flow

MODE = "compression.data_parallel.mode"
WEIGHTS = "compression.data_parallel.weights.compressor"


class OneRank:
    """What a method asks a process group when it is made."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def config(tmp_path: Path, section: dict[str, Any], **megatron: Any) -> Config:
    document = {
        "data": {"source": "mock", "tokenizer": "bytes"},
        "model": {"preset": "gpt-tiny"},
        "megatron": {"use_distributed_optimizer": True, "bf16": True, **megatron},
        "compression": {"data_parallel": section},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return load(path)


def hooks_of(
    loaded: Config, *, seed: int = 1234, distributed_optimizer: bool = True
) -> DataParallelHooks:
    flows = all_flows(loaded.compression.data_parallel.gradients.method)
    hooks = data_parallel_hooks(
        loaded, Counters(flows), seed, distributed_optimizer=distributed_optimizer
    )
    assert hooks is not None
    return hooks


def problems(tmp_path: Path, section: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, section)
    return [
        line.split(": compression.data_parallel.", 1)[1] for line in str(caught.value).splitlines()
    ]


def test_sdp4bit_is_what_was_published(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"mode": "on", "weights": {"compressor": "sdp4bit"}})
    hooks = hooks_of(loaded)
    assert hooks.gradients is not None
    assert hooks.weights is not None
    assert hooks.gradients.compressor == BlockInteger(4, 128, 32, "bf16", "stochastic")
    assert hooks.weights.compressor == BlockInteger(4, 2048, 1, "fp32")
    assert hooks.inside_node == BlockInteger(8, 512, 1, "fp32", "stochastic")
    # An all-reduce goes in one hop, so it needs no groups of nodes.
    assert hooks_of(loaded, distributed_optimizer=False).inside_node is None
    assert hooks.difference
    assert hooks.seed == 1234
    assert load(tmp_path / "run.yaml").to_yaml() == loaded.to_yaml()


def test_other_compressors_take_their_own_settings(tmp_path: Path) -> None:
    section = {
        "mode": "on",
        "gradients": {"compressor": "taco", "format": "int6", "block": 64},
        "weights": {"compressor": "block_integer", "bits": 8, "difference": False},
        "exclude": ["embedding"],
    }
    hooks = hooks_of(config(tmp_path, section), seed=5)
    assert hooks.gradients is not None
    assert hooks.weights is not None
    assert hooks.gradients.compressor == Taco("int6", 64)
    assert hooks.weights.compressor == BlockInteger(8)
    assert (hooks.difference, hooks.inside_node, hooks.seed) == (False, None, 5)
    assert hooks.gradients.is_exact("embedding")
    assert hooks.gradients.is_exact("norm")
    assert not hooks.gradients.is_exact("mlp")


def test_off_is_absent(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"gradients": {"compressor": "taco"}})
    hooks = data_parallel_hooks(loaded, Counters([]), 1234, distributed_optimizer=True)
    assert hooks is None
    assert conflicts.check(loaded) == []
    assert data_conflicts.check_size(loaded, {"data_parallel_size": 1}) == []


def test_expected_flows_follow_the_optimiser_and_what_is_excluded(tmp_path: Path) -> None:
    section = {"mode": "on", "exclude": ["mlp"], "weights": {"compressor": "sdp4bit"}}
    hooks = hooks_of(config(tmp_path, section))

    assert hooks.gradients is not None
    assert hooks.weights is not None
    scattered = expected_flows(hooks.gradients, distributed_optimizer=True)
    assert scattered == [Flow("dp.gradients.attention", "reduce_scatter")]
    gathered = expected_flows(hooks.weights, distributed_optimizer=True)
    assert gathered == [Flow("dp.weights.attention", "all_gather")]
    reduced = expected_flows(hooks.gradients, distributed_optimizer=False)
    assert reduced == [Flow("dp.gradients.attention", "all_reduce")]
    assert {*scattered, *gathered, *reduced} <= set(all_flows())


def test_weights_are_expected_only_after_steps_that_were_taken(tmp_path: Path) -> None:
    """FP16 starts with a loss scale that overflows: steps are skipped, and no weights move."""
    section = {"mode": "on", "weights": {"compressor": "sdp4bit"}}
    loaded = config(tmp_path, section)
    hooks = hooks_of(loaded)
    gradients, weights = data_parallel_checks(
        hooks, loaded, totals=lambda: [], distributed_optimizer=True
    )
    for step in range(5):
        weights.step_done(step, skipped=True)
    weights.finish()
    weights.step_done(5)
    with pytest.raises(FlowCheckError, match=r"dp\.weights\.attention \(all_gather\) is on but"):
        weights.step_done(6)
    gradients.step_done(0, skipped=True)
    with pytest.raises(FlowCheckError, match=r"compression\.data_parallel: role dp\.gradients"):
        gradients.step_done(1, skipped=True)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mode": "maybe"}, "mode: 'maybe' is not allowed; allowed: off, on, auto"),
        (
            {"exclude": ["norm"]},
            "exclude: 'norm' is not a kind of parameters (norms and biases always go exactly); "
            "allowed: attention, mlp, embedding, output_layer, other",
        ),
        (
            {"gradients": {"bits": 8}},
            "gradients.bits: 8 is not for compressor: sdp4bit, which has rounding",
        ),
        (
            {"gradients": {"compressor": "taco", "block": 1024}},
            "gradients.block: 1024 is too large for taco; allowed: 32 to 512",
        ),
        (
            {"gradients": {"compressor": "block_integer", "transform": 256}},
            "gradients.transform: 256 is larger than block: 128",
        ),
        (
            {"mode": "on", "gradients": {"compressor": "none"}},
            "mode: 'on' with gradients.compressor: none and weights.compressor: none compresses "
            "nothing; choose a compressor for one of them, or mode: off",
        ),
        (
            {"gradients": {"compressor": "powersgd", "ratio": 0.1}},
            "gradients.ratio: 0.1 is not for compressor: powersgd, which has rank, "
            "error_feedback, warm_start, memory",
        ),
        (
            {"gradients": {"compressor": "tagc", "ratio": 1.0}},
            "gradients.ratio: 1 is all values, which tagc cannot send; allowed: below 1",
        ),
        (
            {"mode": "auto", "gradients": {"compressor": "topk"}},
            "mode: 'auto' with gradients.compressor: topk: auto compares times, and a method with "
            "memory also changes what is learned from a step; allowed: on",
        ),
        (
            {"gradients": {"compressor": "powersgd", "ranks_per_node": 2}},
            "gradients.ranks_per_node: has no effect with compressor: powersgd; it is for sdp4bit",
        ),
        (
            {"gradients": {"two_level": False, "ranks_per_node": 2}},
            "gradients.ranks_per_node: has no effect with two_level: false",
        ),
        (
            {"weights": {"difference": False}},
            "weights.difference: has no effect with compressor: none",
        ),
        (
            {"exclude": None},
            "exclude: is empty; allowed: [] or a list of attention, mlp, embedding, output_layer, "
            "other",
        ),
        (
            {"weights": {"compressor": "sdp4bit", "rounding": "stochastic"}},
            "weights.rounding: stochastic with difference: true only adds noise, since what is "
            "rounded away is in the next difference; set rounding: nearest",
        ),
    ],
)
def test_one_mistake_is_one_line(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    assert problems(tmp_path, section) == [message]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_megatron_fsdp": True}, "use_megatron_fsdp: false"),
    ({"use_custom_fsdp": True}, "remove megatron.use_custom_fsdp"),
    ({"use_torch_fsdp2": True}, "use_torch_fsdp2: false"),
    ({"reduce_scatter_with_fp32_accumulation": True}, "set megatron.reduce_scatter_with_fp32"),
    ({"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances: 1"),
    ({"optimizer": "dist_muon"}, "choose another megatron.optimizer"),
    ({"optimizer": "muon"}, "set megatron.use_distributed_optimizer: false"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl: none"),
    ({"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer: false"),
    ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload: false"),
    ({"fp8_param_gather": True}, "fp8_param_gather: false"),
    ({"overlap_param_gather_with_optimizer_step": True}, "with_optimizer_step: false"),
]


@pytest.mark.parametrize(("arguments", "change"), REFUSED)
def test_features_are_refused_with_line_reason_and_change(
    tmp_path: Path, arguments: dict[str, Any], change: str
) -> None:
    section = {"mode": "on", "weights": {"compressor": "sdp4bit"}}
    loaded = config(tmp_path, section, **arguments)
    (message,) = conflicts.check(loaded)
    key = f"megatron.{next(iter(arguments))}"
    assert message.startswith(f"{loaded.where(key)}: {key}: ")
    assert change in message


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        ({"use_distributed_optimizer": False}, "needs megatron.use_distributed_optimizer: true"),
        ({"bf16": False}, "needs megatron.bf16 or fp16"),
    ],
)
def test_weights_need_masters_apart(tmp_path: Path, arguments: dict[str, Any], needs: str) -> None:
    section = {"mode": "on", "weights": {"compressor": "sdp4bit"}}
    loaded = config(tmp_path, section, **arguments)
    (message,) = conflicts.check(loaded)
    assert message.startswith(f"{loaded.where(WEIGHTS)}: {WEIGHTS}: sdp4bit {needs}")
    assert conflicts.check(config(tmp_path, {"mode": "on"}, **arguments)) == []


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ({"bf16": False, "fp16": True}, "set megatron.bf16: true instead of fp16"),
        ({"save": "here", "ckpt_format": "torch"}, "set megatron.ckpt_format: torch_dist"),
        ({"load": "here", "non_persistent_ckpt_type": "local"}, "remove megatron.non_persist"),
    ],
)
def test_what_memory_does_not_go_with(
    tmp_path: Path, arguments: dict[str, Any], change: str
) -> None:
    section = {"mode": "on", "gradients": {"compressor": "topk"}}
    (message,) = conflicts.check(config(tmp_path, section, **arguments))
    assert "does not go with compression.data_parallel.gradients.compressor: topk" in message
    assert change in message
    assert conflicts.check(config(tmp_path, {"mode": "on"}, **arguments)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_distributed_optimizer": True}, "true does not go with"),
        ({"num_experts": 4}, "4 does not go with"),
        ({"train_iters": 8}, "8 ends within a round of 3 local steps from start_step 0"),
        ({"save": "here", "save_interval": 4}, "4 is no multiple of"),
        ({"save": "here", "save_interval": 3}, None),
        ({"train_iters": 9}, None),
    ],
)
def test_what_local_steps_do_not_go_with(
    tmp_path: Path, arguments: dict[str, Any], message: str | None
) -> None:
    section = {"mode": "on", "gradients": {"compressor": "sparseloco", "local_steps": 3}}
    megatron = {"use_distributed_optimizer": False, **arguments}
    found = conflicts.check(config(tmp_path, section, **megatron))
    assert len(found) == (message is not None)
    if message is not None:
        assert message in found[0]
        assert next(iter(reversed(arguments))) in found[0]


def test_what_would_never_be_compressed(tmp_path: Path) -> None:
    section = {"mode": "on", "start_step": 4}
    section["gradients"] = {"two_level": True, "ranks_per_node": 2}
    whole = {"use_distributed_optimizer": False}
    late, nodes, hops = conflicts.check(config(tmp_path, section, train_iters=4, **whole))[::-1]
    assert "compression.data_parallel.start_step: 4 is not below the 4 steps of train_" in late
    assert "two_level: true has no effect without megatron.use_distributed_optimizer" in hops
    assert "ranks_per_node: 2 has no effect without megatron.use_distributed" in nodes
    assert conflicts.check(config(tmp_path, section, train_iters=5)) == []


def test_methods_with_memory_are_made_with_their_settings(tmp_path: Path) -> None:
    assert set(METHOD_SETTINGS) == set(METHODS)
    settings = {"compressor": "cd_adam", "block": 64, "transform": 32}
    hooks = hooks_of(config(tmp_path, {"mode": "on", "gradients": settings}))
    assert hooks.gradients is not None
    assert hooks.make_method is not None
    method = hooks.make_method(cast(ProcessGroup, OneRank()), "bucket")
    assert isinstance(method, CDAdam)
    assert method.compressor == BlockInteger(4, 64, 32)
    flows = expected_flows(hooks.gradients, distributed_optimizer=True)
    assert flows == [Flow("dp.gradients.cd_adam", "reduce_scatter")]
    assert set(flows) <= set(all_flows("cd_adam"))


def test_rounds_of_local_steps_count_from_the_start_step(tmp_path: Path) -> None:
    section = {
        "mode": "on",
        "start_step": 1,
        "gradients": {"compressor": "sparseloco", "ratio": 0.1, "bits": 8, "local_steps": 3},
    }
    hooks = hooks_of(config(tmp_path, section))
    assert hooks.local is not None
    assert hooks.make_method is not None
    method = hooks.make_method(cast(ProcessGroup, OneRank()), "bucket")
    assert isinstance(method, SparseLoCo)
    assert (method.start_step, method.local_steps, method.chunk) == (1, 3, 4096)
    assert method.compressor == BlockInteger(8)
    assert [hooks.local.ends_round(step) for step in range(7)] == [True, *[False, False, True] * 2]


def test_one_rank_has_nothing_to_compress(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"mode": "on"})
    sizes = {"data_parallel_size": 1, "context_parallel_size": 1}
    (message,) = data_conflicts.check_size(loaded, sizes)
    assert message.startswith(f"{loaded.where(MODE)}: {MODE}: on with a data-parallel size of 1")
    (message,) = data_conflicts.check_arguments(loaded, sizes | dict(loaded.megatron))
    assert f"{MODE}: on ({loaded.where(MODE)}) with a data-parallel size of 1" in message
    # Megatron reduces over data x context parallel ranks.
    for size in ("data_parallel_size", "context_parallel_size"):
        more = sizes | {size: 2}
        assert data_conflicts.check_size(loaded, more) == []
        assert data_conflicts.check_arguments(loaded, more | dict(loaded.megatron)) == []
