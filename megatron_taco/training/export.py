"""From a run's checkpoint to a model in one piece, with boundaries in place or without.

One process holds the whole model; Megatron loads and saves it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_taco.config import Config, ConfigError, load
from megatron_taco.config.files import missing_files
from megatron_taco.data.errors import DataError
from megatron_taco.patching.errors import PatchError
from megatron_taco.training.quiet import quiet

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_taco.patching.pipeline import PipelineHooks
    from megatron_taco.training.comparison import Measured

OK, NOT_EXACT = 0, 1

_WHOLE = {
    "tensor_model_parallel_size": "1",
    "pipeline_model_parallel_size": "1",
    "context_parallel_size": "1",
    "expert_model_parallel_size": "1",
    "expert_tensor_parallel_size": "null",
    "sequence_parallel": "false",
    "num_layers_per_virtual_pipeline_stage": "null",
    "num_virtual_stages_per_pipeline_rank": "null",
    "pipeline_model_parallel_layout": "null",
    "decoder_first_pipeline_num_layers": "null",
    "decoder_last_pipeline_num_layers": "null",
    "account_for_embedding_in_pipeline_split": "null",
    "account_for_loss_in_pipeline_split": "null",
    "overlap_p2p_comm": "null",
    "overlap_grad_reduce": "false",
    "overlap_param_gather": "false",
    "use_distributed_optimizer": "false",
    "use_layer_wise_distributed_optimizer": "false",
}
"""What a process that holds the whole model sets, where the run says something else."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class ExportError(Exception):
    """There is nothing that could be exported, or nowhere to write it to."""


def export(
    path: str,
    overrides: Sequence[str],
    *,
    checkpoints: Path,
    step: int | None,
    output: Path,
    fold: bool,
    approximate: bool,
    sequences: int,
    random_tokens: bool,
) -> int:
    """Export as ``megatron-taco export`` says; returns the exit code.

    Args:
        path: the run's YAML file.
        overrides: of its keys.
        checkpoints: folder of the run's checkpoints.
        step: which one; the latest if None.
        output: folder to write a checkpoint to.
        fold: without boundaries, instead of with them.
        approximate: also where that is not exact.
        sequences: how many held-out sequences to measure with.
        random_tokens: measure with random ones instead, which needs no data.

    Raises:
        ConfigError: something is wrong with the configuration.
        ExportError: there is no checkpoint with boundaries, or the output is in use.
    """
    if output.exists() and any(output.iterdir()):
        raise ExportError(f"--output {output} is not empty; name a new folder")
    config = _whole(path, overrides, checkpoints, step, output)
    missing = [] if random_tokens else missing_files(config)
    if missing:
        raise ConfigError(missing)
    log = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name, value in _ALONE.items():
            stack.enter_context(_variable(name, value))
        stack.enter_context(quiet(log))
        this = _Export(config, sequences, random_tokens, stack)
        try:
            code = this.run(fold=fold, approximate=approximate)
        except (ConfigError, DataError, ExportError, PatchError):
            raise
        except Exception:
            lines = log.getvalue().splitlines()[-20:]
            print(*lines, sep="\n", file=sys.__stderr__)
            raise
    print(*this.lines, sep="\n")
    return code


def _whole(
    path: str, overrides: Sequence[str], folder: Path, step: int | None, output: Path
) -> Config:
    """The run's configuration for one process, which loads one checkpoint and saves another."""
    run = load(path, overrides)
    ours = [f"megatron.{k}={v}" for k, v in _WHOLE.items() if k in run.megatron]
    ours += [f"compression.{axis}.mode=off" for axis in ("tensor_parallel", "data_parallel")]
    ours += ["telemetry.tensorboard=false", "telemetry.wandb=null"]
    ours += [
        f"megatron.load={folder}",
        *(f"megatron.save={output}", "megatron.save_interval=1"),
        *(f"megatron.{name}=true" for name in ("no_load_optim", "no_load_rng")),
        *(f"megatron.{name}=true" for name in ("no_save_optim", "no_save_rng")),
        "megatron.exit_on_missing_checkpoint=true",
        f"megatron.ckpt_step={'null' if step is None else step}",
    ]
    return load(path, [*overrides, *ours])


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Export:
    """The steps of an export.

    Args:
        config: of one process.
        sequences: to measure with.
        random_tokens: whether they are random.
        stack: what is to be undone at the end.

    Attributes:
        lines: what is to be said.
    """

    def __init__(
        self, config: Config, sequences: int, random_tokens: bool, stack: contextlib.ExitStack
    ) -> None:
        self._config, self._stack = config, stack
        self._sequences, self._random = sequences, random_tokens
        self.lines: list[str] = []

    def run(self, *, fold: bool, approximate: bool) -> int:
        """Load, measure both forms, write one; returns the exit code."""
        args, hooks = self._start()
        model = self._model(args)
        from megatron.core.utils import unwrap_model
        from megatron.training.checkpointing import load_checkpoint

        from megatron_taco.patching import boundary_fold
        from megatron_taco.training.comparison import compared, measure

        step, operations = load_checkpoint([model], None, None)
        model.eval()
        (gpt,) = unwrap_model([model])
        why_not = boundary_fold.obstacle(hooks.settings)
        self._describe(args, hooks, step, why_not)
        what, batches = self._tokens(args)
        kept = measure(model, batches)
        if not fold:
            self._save(args, model, step, operations, "with its boundaries in place")
        boundary_fold.fold(gpt, hooks.chunks[0])
        plain: list[Measured] = measure(model, batches)
        self.lines.append(f"measured on {what}: {compared(kept, plain)}")
        if not fold:
            return OK
        if why_not is not None and not approximate:
            self.lines.append(
                "nothing written: without its boundaries it is another model; use --boundaries "
                "keep, or --approximate to have it anyway"
            )
            return NOT_EXACT
        self._save(args, model, step, operations, "without boundaries, for Megatron alone")
        return OK

    def _start(self) -> tuple[argparse.Namespace, PipelineHooks]:
        """Megatron with one process: its global arguments, and hooks for the model to come."""
        import torch.distributed as dist

        from megatron_taco.training import megatron_args
        from megatron_taco.training.embedded import embedded_data

        device = megatron_args.resolve_device(self._config)
        for name, value in megatron_args.environment(self._config, device).items():
            os.environ.setdefault(name, value)
        if device == "cpu":
            from megatron_taco.patching.cpu import CpuShim

            shim = CpuShim().install()
            self._stack.callback(shim.undo)
            shim.install_megatron()
        data = None if self._random else embedded_data(self._config)
        embedded = None if data is None else data.prefixes
        args = megatron_args.parse(self._config, device=device, embedded=embedded)
        self._with_depths(args)
        from megatron.training.global_vars import set_global_variables
        from megatron.training.initialize import initialize_megatron

        set_global_variables(args)
        hooks = self._hooks()
        initialize_megatron(allow_no_cuda=device == "cpu", store=dist.HashStore())
        self._stack.callback(dist.destroy_process_group)
        return args, hooks

    def _with_depths(self, args: argparse.Namespace) -> None:
        """Read from the checkpoint where its boundaries sit.

        Raises:
            ExportError: there is no such checkpoint, or it has no boundaries.
        """
        from megatron_taco.patching.boundary_saved import saved_depths

        depths = saved_depths(args)
        if depths is None:
            step = "" if args.ckpt_step is None else f" of step {args.ckpt_step}"
            raise ExportError(f"--load {args.load}: there is no distributed checkpoint{step}")
        if not depths or not self._config.compression.pipeline_parallel.enabled:
            has = f"boundaries after layers {depths}" if depths else "no boundaries"
            mode = self._config.compression.pipeline_parallel.mode
            raise ExportError(
                f"--load {args.load} has {has}, and --config has "
                f"compression.pipeline_parallel.mode: {mode}: there is nothing to export"
            )
        self._depths = tuple(depths)

    def _hooks(self) -> PipelineHooks:
        """Hook the model's construction, beside the repairs that Megatron needs to start."""
        from megatron_taco.patching.model_init import ModelInit
        from megatron_taco.patching.pipeline import PipelineHooks
        from megatron_taco.patching.registry import Registry
        from megatron_taco.patching.startup import repair
        from megatron_taco.telemetry.counters import Counters

        settings = self._config.compression.pipeline_parallel
        settings = settings.model_copy(update={"after_layers": self._depths})
        hooks = PipelineHooks(settings, Counters([]))
        registry = Registry()
        repair(registry)
        ModelInit([hooks.model_built]).claim(registry)
        self._stack.callback(registry.apply().undo)
        return hooks

    def _model(self, args: argparse.Namespace) -> Any:
        """The whole model with its boundaries in place, not yet loaded."""
        from megatron.training.training import get_model

        from megatron_taco.training.model import ModelProvider

        layers = self._config.model.layers(args.transformer_impl)
        (model,) = get_model(ModelProvider(args, layers), wrap_with_ddp=False)
        return model

    def _describe(
        self, args: argparse.Namespace, hooks: PipelineHooks, step: int, why_not: str | None
    ) -> None:
        settings = hooks.settings
        parts = [settings.kind, f"after layers {list(self._depths)}"]
        parts += [f"rank {settings.rank} of {settings.hidden}"] if settings.rank else []
        parts += [f"anchors {settings.anchors}"] if settings.anchors != "none" else []
        if settings.forward.kind != "none":
            parts.append(f"quantizer {settings.forward.kind}")
        folded = "exact up to rounding" if why_not is None else f"not exact: {why_not}"
        self.lines += [
            f"checkpoint: {args.load}, step {step}",
            f"boundaries: {', '.join(parts)}",
            "kept in place: exact; loads where megatron_taco runs with these settings",
            f"folded: {folded}",
        ]

    def _tokens(self, args: argparse.Namespace) -> tuple[str, list[tuple[Tensor, Tensor]]]:
        """What to measure with: its name, and (tokens, labels) int64 [1, s] of each sequence."""
        from megatron_taco.training import comparison

        if self._random:
            batches = comparison.random_batches(self._sequences, args.seq_length, args.vocab_size)
            what = "random"
        else:
            from megatron_taco.training.datasets import train_valid_test_datasets_provider

            number = self._sequences
            _, valid, _ = train_valid_test_datasets_provider([number] * 3)
            if valid is None or not len(valid):
                raise ExportError(
                    "the configuration has no validation data to measure with; set data.split or "
                    "data.valid_path, or give --random-tokens"
                )
            batches = comparison.batches_of(valid, self._sequences)
            what = "held-out"
        return f"{len(batches)} {what} sequences of {args.seq_length} tokens", batches

    def _save(
        self, args: argparse.Namespace, model: Any, step: int, operations: Any, how: str
    ) -> None:
        from megatron.training.checkpointing import save_checkpoint

        save_checkpoint(step, [model], None, None, operations)
        self.lines.append(f"wrote {args.save}, step {step}: the model {how}")
