"""From a configuration to Megatron's arguments, through Megatron's own parser and checks.

The configuration becomes a command line, which the installed Megatron parses and validates. What
it refuses comes back as a `ConfigError` with the place of the key, before any process group exists.

The text of `data.tokenizer: bytes` needs no tokenizer in Megatron: token ids are the bytes 0 to
255, and `NullTokenizer` with a vocabulary of 257 has its last id, 256, as the end of a document.
"""

import contextlib
import importlib.util
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from megatron_taco.config import Config, ConfigError, Problem
from megatron_taco.config.megatron_section import OWNED, whole
from megatron_taco.training import extras
from megatron_taco.training.megatron_failures import FAILURES, explain
from megatron_taco.training.megatron_options import OptionError, Options, megatron_options

Device = Literal["cpu", "cuda"]

_EMBEDDED_SPLITS: Final = ("train", "valid")


def resolve_device(config: Config) -> Device:
    """Return the device that `run.device` means on this machine.

    Raises:
        ConfigError: It is `cuda`, and PyTorch sees no GPU.
    """
    import torch

    available = torch.cuda.is_available()
    if config.run.device == "cuda" and not available:
        raise ConfigError(
            config.problem(
                "run.device", "'cuda', but PyTorch sees no GPU here; allowed here: auto, cpu"
            )
        )
    if config.run.device == "auto":
        return "cuda" if available else "cpu"
    return config.run.device


def environment(config: Config, device: Device) -> dict[str, str]:
    """Return the environment variables that a run needs, to be set before torch is used.

    CUDA_DEVICE_MAX_CONNECTIONS=1 is what Megatron's validation asks for with tensor or context
    parallelism before the Blackwell generation; 8 was no faster (docs/results/forward-overlap.md).
    TorchDynamo compiles nothing on a CPU.
    """
    variables = {}
    fsdp = config.megatron.get("use_megatron_fsdp") or config.megatron.get("use_torch_fsdp2")
    if not fsdp:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if device == "cpu":
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.telemetry.wandb is not None:
        variables["WANDB_MODE"] = config.telemetry.wandb.mode
    return variables


def defaults(config: Config, device: Device) -> dict[str, Any]:
    """Return the arguments that a run gets where the configuration says nothing.

    Megatron's own defaults ask for Transformer Engine, Apex and CUDA kernels that no wheel holds.
    Each of these is used if it is there; on a CPU nothing is fused.
    """
    values: dict[str, Any] = {
        "transformer_impl": "local",
        "seq_length": config.model.max_position_embeddings,
        "no_persist_layer_norm": not _installed("fast_layer_norm"),  # Apex's persistent kernel
        "gradient_accumulation_fusion": _installed("fused_weight_gradient_mlp_cuda"),
        "masked_softmax_fusion": _installed("scaled_upper_triang_masked_softmax_cuda"),
        "apply_rope_fusion": _installed("transformer_engine"),
        "enable_one_logger": False,
        "eval_interval": _after_the_end(config),
    }
    if config.megatron.get("save") is None:
        # On a NaN the rerun machine saves a checkpoint to be diagnosed, and without a folder it
        # fails before it says what was wrong.
        values["rerun_mode"] = "disabled"
    if device == "cpu":
        values |= {
            "distributed_backend": "gloo",
            "use_cpu_initialization": True,
            "attention_backend": "unfused",
            "num_workers": 0,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_gelu_fusion": False,
            "bias_swiglu_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "no_persist_layer_norm": True,
        }
    return values


def megatron_argv(
    config: Config, *, device: Device | None = None, embedded: Mapping[str, str] | None = None
) -> list[str]:
    """Return Megatron's command line for a configuration.

    Args:
        config: The configuration.
        device: Where it runs; `resolve_device(config)` if not given.
        embedded: Prefixes of the prepared `data.source: python-stdlib`, by `train` and `valid`.
            Without it no data set is named, which Megatron's parser accepts.

    Raises:
        ConfigError: Megatron has no such argument, or it does not take the value.
    """
    device = device or resolve_device(config)
    argv, problems = _command_line(config, megatron_options(), device, embedded)
    if problems:
        raise ConfigError(problems)
    return argv


def parse(
    config: Config,
    *,
    device: Device | None = None,
    embedded: Mapping[str, str] | None = None,
    world_size: int | None = None,
) -> Namespace:
    """Parse and validate a configuration with Megatron's own code.

    `sys.argv` and the environment are as before when this returns. Megatron's global variables are
    not set: that is the caller's next step, with
    `megatron.training.global_vars.set_global_variables`. Megatron prints its arguments.

    Args:
        config: The configuration.
        device: As for `megatron_argv`.
        embedded: As for `megatron_argv`.
        world_size: Number of processes to check for; if not given that of the environment
            (WORLD_SIZE), which Megatron reads itself.

    Returns:
        Megatron's arguments, validated, from which also the model's configuration can be built.

    Raises:
        ConfigError: Megatron refuses something.
    """
    options = megatron_options()
    argv, problems = _command_line(config, options, device or resolve_device(config), embedded)
    with _world(world_size):
        problems += _layout_problems(config) + extras.missing(config)
        if problems:
            raise ConfigError(problems)
        return _parsed(config, argv, options)


def smallest_world_size(config: Config) -> int:
    """Return the smallest number of processes that the parallel sizes can run on.

    That is tensor x pipeline x context, of which every other number of processes is a multiple,
    and with expert parallelism also a multiple of expert tensor x expert x pipeline.
    """
    tensor, pipeline = _size(config, "tensor_model"), _size(config, "pipeline_model")
    experts = _size(config, "expert_model")
    if experts == 1:
        return tensor * pipeline * _size(config, "context")
    given = whole(config.megatron.get("expert_tensor_parallel_size"))
    return pipeline * math.lcm(tensor * _size(config, "context"), (given or tensor) * experts)


def _parsed(config: Config, argv: list[str], options: Options) -> Namespace:
    """Return what Megatron's parser and its checks make of a command line."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    try:
        with _sys_argv(argv):
            args = parse_args()
        validate_args(args)
        core_transformer_config_from_args(args)
    except FAILURES as error:
        key, message = explain(error, _keys(config, options), options)
        if key is None:
            problem = Problem(location=config.origins.file, key="megatron", message=message)
        else:
            problem = config.problem(key, message)
        raise ConfigError(problem) from None
    return Namespace(**vars(args))


def _after_the_end(config: Config) -> int | None:
    """Return an evaluation interval with which a run is evaluated once, when it is over.

    Megatron has no default, fails without one, and evaluates at the end whatever the interval.
    """
    iterations = config.megatron.get("train_iters")
    return int(iterations) + 1 if isinstance(iterations, int | float) else 1000


def _installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


@contextlib.contextmanager
def _sys_argv(argv: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0] if before else "megatron_taco", *argv]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _world(size: int | None) -> Iterator[None]:
    """Let WORLD_SIZE be `size` for a while, if one is given."""
    before = os.environ.get("WORLD_SIZE")
    if size is not None:
        os.environ["WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        if size is not None:
            os.environ.pop("WORLD_SIZE")
            if before is not None:
                os.environ["WORLD_SIZE"] = before


def _section_arguments(
    config: Config, embedded: Mapping[str, str] | None
) -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted key, Megatron's name, value) for what our own sections say."""
    for name, value in config.model.arguments().items():
        if name != "vocab_size":
            yield f"model.{name}", name, value
    if config.model.num_query_groups is not None:
        grouped = config.model.num_query_groups != config.model.num_attention_heads
        yield "model.num_query_groups", "group_query_attention", grouped
    if config.model.vocab_size is not None:
        yield "model.vocab_size", "padded_vocab_size", padded_vocabulary(config)
    yield from _data_arguments(config, embedded)
    if config.telemetry.tensorboard:
        yield "telemetry.tensorboard", "tensorboard_dir", str(config.run.folder / "tensorboard")
    wandb = config.telemetry.wandb
    if wandb is not None:
        yield "telemetry.wandb.project", "wandb_project", wandb.project
        yield "telemetry.wandb.entity", "wandb_entity", wandb.entity
        yield "run.name", "wandb_exp_name", config.run.name
        yield "run.dir", "wandb_save_dir", str(config.run.folder / "wandb")


def _data_arguments(
    config: Config, embedded: Mapping[str, str] | None
) -> Iterator[tuple[str, str, Any]]:
    data = config.data
    if data.source == "mock":
        yield "data.source", "mock_data", True
    elif data.source is not None:
        for split in _EMBEDDED_SPLITS:
            if embedded is not None and split in embedded:
                yield "data.source", f"{split}_data_path", [embedded[split]]
    for key in ("path", "train_path", "valid_path", "test_path"):
        blend = getattr(data, key)
        if blend is not None:
            yield f"data.{key}", key.replace("path", "data_path"), list(blend)
    if data.split is not None:
        yield "data.split", "split", data.split
    tokenizer = data.tokenizer
    if tokenizer.kind == "hf":
        yield "data.tokenizer", "tokenizer_type", "HuggingFaceTokenizer"
        yield "data.tokenizer", "tokenizer_model", tokenizer.path
    else:
        yield "data.tokenizer", "tokenizer_type", "NullTokenizer"
        yield "data.tokenizer", "vocab_size", tokenizer.vocab_size
        yield "data.tokenizer", "null_tokenizer_eod_id", tokenizer.vocab_size - 1


def padded_vocabulary(config: Config) -> int | None:
    """Return `model.vocab_size` padded as Megatron pads, or None if it is not set.

    That is the next multiple of make_vocab_size_divisible_by times the tensor-parallel size.
    """
    if config.model.vocab_size is None:
        return None
    multiple = (config.model.make_vocab_size_divisible_by or 128) * _size(config, "tensor_model")
    return -(-config.model.vocab_size // multiple) * multiple


def _command_line(
    config: Config, options: Options, device: Device, embedded: Mapping[str, str] | None
) -> tuple[list[str], list[Problem]]:
    argv: list[str] = []
    problems: list[Problem] = []
    said: dict[str, str] = {}
    given = list(_section_arguments(config, embedded))
    given += [(f"megatron.{name}", name, value) for name, value in config.megatron.items()]
    for key, name, value in given:
        dest = options.dest(name)
        if value is None and dest is not None:
            continue  # null: as if the key were not there
        if dest in said and key.startswith("megatron."):
            message = f"contradicts {said[dest]}, which sets the same argument; keep one of them"
            problems.append(config.problem(key, message))
            continue
        try:
            argv += options.tokens(name, value)
        except OptionError as error:
            problems.append(config.problem(key, str(error)))
        if dest is not None:
            said[dest] = key
    for name, value in defaults(config, device).items():
        dest = options.dest(name)  # None: this Megatron does not have it, so nothing to say
        if dest is not None and dest not in said:
            argv += options.tokens(name, value)
    return argv, problems


def _keys(config: Config, options: Options) -> dict[str, str]:
    """Return the dotted key by every Megatron name of each argument that the user set."""
    keys: dict[str, str] = {}
    for key, name, _ in _section_arguments(config, None):
        keys[name] = key
    for name in config.megatron:
        keys[name] = f"megatron.{name}"
        keys[options.dest(name) or name] = f"megatron.{name}"
    for name, key in OWNED.items():
        if config.where(key) != "default":
            keys.setdefault(name, key)
    return keys


def _size(config: Config, axis: str) -> int:
    return max(1, whole(config.megatron.get(f"{axis}_parallel_size")) or 1)


def _layout_problems(config: Config) -> list[Problem]:
    """Return where the number of processes, the parallel sizes and the batch do not agree.

    Megatron checks these too, some of it later or without a message.
    """
    megatron = config.megatron
    problems = []
    world = int(os.environ.get("WORLD_SIZE", "1"))
    axes = [a for a in ("tensor_model", "pipeline_model", "context") if _size(config, a) > 1]
    ranks = 1
    for axis in axes:
        ranks *= _size(config, axis)
    if world % ranks:
        product = " x ".join(f"{axis}_parallel_size {_size(config, axis)}" for axis in axes)
        problems.append(
            config.problem(
                f"megatron.{axes[0]}_parallel_size",
                f"{product} = {ranks} ranks, which does not divide the {world} started; "
                f"start a multiple of {ranks} (torchrun --nproc-per-node) or change the sizes",
            )
        )
    micro = megatron.get("micro_batch_size")
    if micro is None:
        problems.append(config.problem("megatron.micro_batch_size", "required"))
    if not any(megatron.get(name) for name in ("train_iters", "train_samples", "skip_train")):
        message = "required (or train_samples): how long to train"
        problems.append(config.problem("megatron.train_iters", message))
    for name, least in (("log_interval", 1), ("seed", 0)):
        value = whole(megatron.get(name))
        if value is not None and value < least:
            key = f"megatron.{name}"
            problems.append(config.problem(key, f"{value}, allowed: {least} or more"))
    if megatron.get("lr") is None and not megatron.get("skip_train"):
        problems.append(config.problem("megatron.lr", "required: the peak learning rate"))
    total, micro = whole(megatron.get("global_batch_size")), whole(micro)
    if total is not None and micro is not None and micro > 0 and not world % ranks:
        share = micro * (world // ranks)
        if total % share and not megatron.get("decrease_batch_size_if_needed"):
            problems.append(
                config.problem(
                    "megatron.global_batch_size",
                    f"{total} is not a multiple of micro_batch_size {micro} x "
                    f"{world // ranks} data-parallel ranks = {share}",
                )
            )
    for unit in ("iters", "samples"):
        warmup = megatron.get(f"lr_warmup_{unit}")
        length = megatron.get(f"lr_decay_{unit}") or megatron.get(f"train_{unit}")
        if not isinstance(warmup, int | float) or not isinstance(length, int | float):
            continue
        if warmup >= length:
            message = f"{warmup} is not less than the {length} {unit} of the learning rate's decay"
            problems.append(config.problem(f"megatron.lr_warmup_{unit}", message))
    return problems
