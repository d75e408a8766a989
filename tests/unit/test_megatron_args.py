"""Configurations through Megatron's own parser and validation."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_taco.config import Config, ConfigError, count_parameters, load
from megatron_taco.patching.cpu import CpuShim
from megatron_taco.training.megatron_args import (
    Device,
    defaults,
    environment,
    megatron_argv,
    parse,
    resolve_device,
    smallest_world_size,
)
from megatron_taco.training.megatron_failures import describe_known

CONFIGS = Path(__file__).parents[2] / "configs"

SMALL = """\
data: {source: python-stdlib}
model: {preset: gpt-tiny}
megatron:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  micro_batch_size: 2
  global_batch_size: 8
  train_iters: 10
  lr: 1e-3
  bf16: true
"""

Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    path = tmp_path / "x.yaml"
    path.write_text(SMALL)
    return lambda *overrides: load(path, overrides)


@pytest.fixture
def parse_as(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parse as one of so many ranks; validation asks the GPU its generation, so one answers."""
    import torch

    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)

    def parse_as(
        config: Config, world: int, device: Device = "cpu", **more: Any
    ) -> argparse.Namespace:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("RANK", "1")
        for name, value in environment(config, device).items():
            monkeypatch.setenv(name, value)
        return parse(config, device=device, **more)

    return parse_as


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(CONFIGS))[:-5] for path in CONFIGS.rglob("*.yaml"))
)
def test_every_configuration_file_is_accepted_by_megatron(name: str, parse_as: Parse) -> None:
    from megatron.training import argument_utils

    config = load(CONFIGS / f"{name}.yaml")
    args = parse_as(
        config, *((4, "cpu") if name == "demo-cpu" else (16 if "/" in name else 8, "cuda"))
    )
    transformer, wanted = argument_utils.core_transformer_config_from_args(args), config.model
    assert args.data_parallel_size >= 1
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    assert args.num_layers == wanted.num_layers
    assert args.layernorm_epsilon == wanted.norm_epsilon
    assert transformer.num_query_groups == (wanted.num_query_groups or wanted.num_attention_heads)
    assert transformer.gated_linear_unit is bool(wanted.swiglu)
    assert transformer.add_bias_linear is bool(wanted.add_bias_linear)
    assert args.untie_embeddings_and_output_weights is bool(
        wanted.untie_embeddings_and_output_weights
    )
    # What Megatron filled in (widths, channels) is what the parameter count assumed.
    filled = {**wanted.arguments(), "ffn_hidden_size": args.ffn_hidden_size}
    filled["kv_channels"] = args.kv_channels
    assert count_parameters(filled, 1000) == count_parameters(wanted.arguments(), 1000)
    if not hasattr(argument_utils, "gpt_config_from_args"):
        return  # 0.18 builds from the arguments themselves
    model = argument_utils.gpt_config_from_args(args)
    assert model.share_embeddings_and_output_weights is (
        not wanted.untie_embeddings_and_output_weights
    )
    assert model.vocab_size >= (wanted.vocab_size or 257)
    if not model.should_pad_vocab:
        assert model.vocab_size % args.tensor_model_parallel_size == 0


def test_defaults_of_a_cpu_run(small: Callable[..., Config], parse_as: Parse) -> None:
    args = parse_as(small(), 4)
    assert args.distributed_backend == "gloo"
    assert args.transformer_impl == "local"
    assert args.seq_length == 128
    assert args.num_workers == 0
    assert args.use_cpu_initialization
    assert args.attention_backend.name == "unfused"
    assert args.eval_interval == 11
    kernels = ("masked_softmax", "bias_gelu", "bias_swiglu", "bias_dropout", "apply_rope")
    for kernel in (*kernels, "gradient_accumulation"):
        assert getattr(args, f"{kernel}_fusion") is False
    assert args.no_persist_layer_norm
    assert (args.save, args.load) == (None, None)


def test_what_the_user_says_wins_over_the_defaults(
    small: Callable[..., Config], parse_as: Parse
) -> None:
    config = small("megatron.seq_length=64", "megatron.num_workers=1", "megatron.eval_interval=5")
    args = parse_as(config, 4)
    assert (args.seq_length, args.num_workers, args.eval_interval) == (64, 1, 5)
    assert set(defaults(config, "cpu")) >= {"seq_length", "num_workers"}


def test_bytes_are_their_own_ids_and_256_ends_a_document(
    small: Callable[..., Config], parse_as: Parse
) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = parse_as(small(), 4)
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert args.padded_vocab_size == 272  # a multiple of 8 times 2 tensor-parallel ranks


def test_data_sections_become_megatrons_arguments(small: Callable[..., Config]) -> None:
    embedded = {"train": "/c/train", "valid": "/c/valid"}
    argv = megatron_argv(small(), device="cpu", embedded=embedded)
    assert argv[argv.index("--train-data-path") + 1] == "/c/train"
    assert argv[argv.index("--valid-data-path") + 1] == "/c/valid"
    assert not any("data-path" in token for token in megatron_argv(small(), device="cpu"))
    mock = megatron_argv(small("data.source=mock", "data.tokenizer={null: 99}"), device="cpu")
    assert "--mock-data" in mock
    assert "--vocab-size=99" in mock
    assert "--null-tokenizer-eod-id=98" in mock
    blend = "data={path: [0.3, a, 1, b], split: '9,1', tokenizer: {hf: t}}"
    own = megatron_argv(small(blend), device="cpu")
    at = own.index("--data-path")
    assert own[at : at + 5] == ["--data-path", "0.3", "a", "1.0", "b"]
    assert {"--split=9,1", "--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-model=t"} <= set(
        own
    )


def test_the_vocabulary_of_the_model_is_padded_for_the_ranks(
    small: Callable[..., Config],
) -> None:
    argv = megatron_argv(small("model.preset=gpt-350m"), device="cpu")
    assert "--padded-vocab-size=50432" in argv  # 197 times 128 times 2
    argv = megatron_argv(small("model.preset=qwen3-0.6b"), device="cpu")
    assert "--padded-vocab-size=151936" in argv  # as published
    assert "--group-query-attention" in argv


def test_telemetry_writers_write_into_the_run_folder(small: Callable[..., Config]) -> None:
    config = small("telemetry={tensorboard: true, wandb: {project: p, mode: offline}}")
    argv = megatron_argv(config, device="cpu")
    assert "--tensorboard-dir=runs/run/tensorboard" in argv
    assert {"--wandb-project=p", "--wandb-exp-name=run"} <= set(argv)
    assert not any(token.startswith("--wandb-entity") for token in argv)
    assert environment(config, "cpu")["WANDB_MODE"] == "offline"


def test_the_device_is_what_there_is(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(small()) == "cpu"
    with pytest.raises(ConfigError) as caught:
        resolve_device(small("run.device=cuda"))
    assert str(caught.value) == (
        "command line: run.device=cuda: 'cuda', but PyTorch sees no GPU here; "
        "allowed here: auto, cpu"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(small()) == "cuda"
    assert resolve_device(small("run.device=cpu")) == "cpu"


MISTAKES = {
    ("megatron.lr=abc",): ["command line: megatron.lr=abc: 'abc' is not allowed; "],
    ("megatron.tensor_modle_parallel_size=2",): [
        "command line: megatron.tensor_modle_parallel_size=2: Megatron has no such argument "
        "(nearest: tensor_model_parallel_size)"
    ],
    ("megatron.attention_backend=unfusd", "megatron.bf16=1"): [
        "command line: megatron.bf16=1: 1 is not allowed; allowed: true or false",
        "command line: megatron.attention_backend=unfusd: 'unfusd' is not allowed; "
        "allowed: flash, fused, unfused, local, auto (nearest: unfused)",
    ],
    ("megatron.no_rope_fusion=true", "megatron.apply_rope_fusion=false"): [
        "command line: megatron.apply_rope_fusion=false: contradicts megatron.no_rope_fusion, "
        "which sets the same argument; keep one of them"
    ],
    ("megatron.pipeline_model_parallel_size=3",): [
        "x.yaml:4: megatron.tensor_model_parallel_size: tensor_model_parallel_size 2 x "
        "pipeline_model_parallel_size 3 = 6 ranks, which does not divide the 4 started; "
        "start a multiple of 6 (torchrun --nproc-per-node) or change the sizes"
    ],
    ("megatron.micro_batch_size=3",): [
        "x.yaml:7: megatron.global_batch_size: 8 is not a multiple of micro_batch_size 3 x "
        "1 data-parallel ranks = 3"
    ],
    ("megatron.micro_batch_size=null", "megatron.lr=null", "megatron.train_iters=null"): [
        "command line: megatron.micro_batch_size=null: required",
        "command line: megatron.train_iters=null: required (or train_samples): how long to train",
        "command line: megatron.lr=null: required: the peak learning rate",
    ],
    ("megatron.log_interval=0", "megatron.seed=-1"): [
        "command line: megatron.log_interval=0: 0, allowed: 1 or more",
        "command line: megatron.seed=-1: -1, allowed: 0 or more",
    ],
    ("megatron.lr_warmup_iters=10",): [
        "command line: megatron.lr_warmup_iters=10: 10 is not less than the 10 iters of the "
        "learning rate's decay"
    ],
    # Below, Megatron's own checks: with a message, without one, leaving the process, and late ones
    # from the model's configuration.
    ("megatron.seq_length=4096",): [
        "x.yaml:2: model.max_position_embeddings: Megatron refuses it: max_position_embeddings "
        "(128) must be greater than or equal to seq_length (4096). (see also megatron.seq_length)"
    ],
    ("megatron.fp16=true",): [
        "x.yaml:10: megatron.bf16: Megatron refuses it: the condition `not args.bf16` does not "
        "hold (see also megatron.fp16)"
    ],
    ("model.num_layers=3",): [
        "x.yaml:5: megatron.pipeline_model_parallel_size: Megatron refuses it: Number of layers "
        "should be divisible by the pipeline-model-parallel size (see also model.num_layers)"
    ],
    ("megatron.checkpoint_activations=true",): [
        "command line: megatron.checkpoint_activations=true: Megatron refuses it: "
        "it stops where `args.checkpoint_activations`"
    ],
    ("model.num_attention_heads=1",): [
        "command line: model.num_attention_heads=1: Megatron refuses it: num_attention_heads (1) "
        "must be a multiple of tensor_model_parallel_size (2). "
        "(see also megatron.tensor_model_parallel_size)"
    ],
    ("megatron.enable_msc=true",): [
        "command line: megatron.enable_msc=true: Megatron refuses it: --enable-msc was passed but "
    ],
}


@pytest.mark.parametrize("overrides", MISTAKES, ids=lambda overrides: overrides[0])
def test_what_megatron_refuses_is_one_line_with_the_key(
    overrides: tuple[str, ...],
    small: Callable[..., Config],
    parse_as: Parse,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = list(sys.argv)
    with pytest.raises(ConfigError) as caught:
        parse_as(small(*overrides), 4)
    lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert len(lines) == len(MISTAKES[overrides])
    for line, expected in zip(lines, MISTAKES[overrides], strict=True):
        assert line.startswith(expected), line
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert capsys.readouterr().err == ""
    assert sys.argv == argv


def test_parsing_leaves_the_command_line_and_megatrons_globals_alone(
    small: Callable[..., Config], parse_as: Parse
) -> None:
    from megatron.training import global_vars

    argv = list(sys.argv)
    first, second = parse_as(small(), 4), parse_as(small(), 4)
    assert vars(first).keys() == vars(second).keys()
    assert sys.argv == argv
    with pytest.raises(AssertionError):
        global_vars.get_args()


def test_the_world_size_can_be_given_without_a_launcher(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for started in (None, "1"):
        if started is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", started)
        with pytest.raises(ConfigError, match="does not divide the 1 started"):
            parse(small(), device="cpu")
        with CpuShim():
            args = parse(small(), device="cpu", world_size=smallest_world_size(small()))
        assert (args.world_size, args.data_parallel_size) == (4, 1)
        assert os.environ.get("WORLD_SIZE") == started


@pytest.mark.parametrize(
    ("sizes", "smallest"),
    [
        ({}, 4),
        ({"pipeline_model": 1}, 2),
        ({"tensor_model": 4.0}, 8),
        ({"context": 3, "tensor_model": 1}, 6),
        ({"expert_model": 4}, 16),
        ({"expert_model": 4, "expert_tensor": 1}, 8),
        ({"expert_model": 3, "expert_tensor": 1}, 12),
    ],
)
def test_smallest_world_size(
    sizes: dict[str, float], smallest: int, small: Callable[..., Config]
) -> None:
    overrides = [f"megatron.{axis}_parallel_size={size}" for axis, size in sizes.items()]
    te = ["megatron.transformer_impl=transformer_engine", "model.attention=megatron"]
    assert smallest_world_size(small(*overrides, *te)) == smallest


def test_batches_written_as_floats_are_checked_like_others(
    small: Callable[..., Config], parse_as: Parse
) -> None:
    with pytest.raises(ConfigError, match="9 is not a multiple of micro_batch_size 2 x 1"):
        parse_as(small("megatron.global_batch_size=9.0", "megatron.micro_batch_size=2.0"), 4)


def scheduler(**changed: float | str) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 48,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 48,
        "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,  # Megatron's own default for a run
    }
    return OptimizerParamScheduler(SimpleNamespace(param_groups=[]), **{**settings, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_lr": 2e-3}, ["learning rate is 0.002 there and 0.001 here; ", "megatron.lr as"]),
        (
            {"lr_decay_steps": 96, "wd_incr_steps": 96},
            [
                "96 samples (iterations x global_batch_size) there and 48 here",
                "lr_decay_iters / train_iters",
            ],
        ),
        ({"lr_warmup_steps": 8}, ["lr_warmup_iters / lr_warmup_fraction"]),
        ({"lr_decay_style": "linear"}, ["linear there and cosine here", "megatron.lr_decay_style"]),
        ({"wd_incr_steps": 96}, ["megatron.train_iters as"]),
    ],
)
def test_another_schedule_than_the_checkpoints_is_explained(
    changed: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(AssertionError) as caught:
        scheduler().load_state_dict(scheduler(**changed).state_dict())
    told = describe_known(caught.value)
    assert told is not None
    assert "\n" not in told
    for word in [*words, "megatron.load", "megatron.override_opt_param_scheduler: true"]:
        assert word in told


def test_another_model_than_the_checkpoints_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import checkpointing

    here = argparse.Namespace(num_layers=2, hidden_size=8)
    there = argparse.Namespace(num_layers=4, hidden_size=8)
    monkeypatch.setattr(checkpointing, "get_args", lambda: here)
    with pytest.raises(AssertionError) as caught:
        checkpointing.check_checkpoint_args(there)
    assert describe_known(caught.value) == (
        "model.num_layers: the checkpoint of megatron.load was written with num_layers 4, here it "
        "is 2; set 4, or load another checkpoint"
    )


def test_another_shape_than_the_checkpoints_is_explained() -> None:
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    stored = SimpleNamespace(state_dict_metadata={"a.weight": SimpleNamespace(size=(4, 8))})
    wanted = [SimpleNamespace(key="a.weight", global_shape=(4, 16))]
    with pytest.raises(Exception, match="shape mismatch") as caught:
        MCoreLoadPlanner._validate_global_shapes(None, stored, wanted)
    told = describe_known(caught.value)
    assert told is not None
    assert "tensor a.weight has the shape (4, 8) in the checkpoint and (4, 16) here" in told


def test_what_is_not_known_is_left_alone() -> None:
    assert describe_known(ValueError("something else")) is None
