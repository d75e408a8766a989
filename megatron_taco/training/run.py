"""One training run from its configuration file to its end table."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_taco.config import Config, ConfigError, Problem, load
from megatron_taco.config.files import missing_files
from megatron_taco.training.failures import describe
from megatron_taco.training.launch_env import Ranks, ranks_from_environment
from megatron_taco.training.megatron_args import Device
from megatron_taco.training.run_folder import RunFolder, versions

if TYPE_CHECKING:
    from megatron_taco.patching.session import Session

OK, FAILED, USER_ERROR = 0, 1, 2
_LOGGED_TO_FILE = (
    "py.warnings",
    "megatron",
    "megatron_taco",
    "torch.utils.cpp_extension",
)


def run(path: str, overrides: Sequence[str], *, check_only: bool = False) -> int:
    """Train as ``path`` says; returns the exit code.

    Args:
        path: the YAML file.
        overrides: ``dotted.key=value`` strings.
        check_only: stop after Megatron's own parser has accepted the configuration.
    """
    ranks = ranks_from_environment()
    try:
        config = load(path, overrides)
        return _Run(config, ranks, sys.stdout).execute(check_only=check_only)
    except ConfigError as error:
        return _complain(ranks, error, USER_ERROR)


def _complain(ranks: Ranks, error: BaseException, code: int) -> int:
    """Print a user's mistake once a machine; its ranks find the same one and leave alike."""
    if ranks.local_rank == 0:
        where = "" if ranks.rank == 0 else f" (rank {ranks.rank} on {socket.gethostname()})"
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
    return code


class _Run:
    """The steps of a run, in order; each is a method."""

    def __init__(self, config: Config, ranks: Ranks, console: IO[str]) -> None:
        self.config = config
        self.ranks = ranks
        self.console = console
        self.folder = RunFolder(config.run.folder)
        self.session: Session | None = None
        self.data_digest: str | None = None

    def execute(self, *, check_only: bool) -> int:
        """Check, agree, train; see :func:`run`."""
        from megatron_taco.data import DataError
        from megatron_taco.patching import conflicts
        from megatron_taco.patching.errors import PatchError
        from megatron_taco.patching.flows import FlowCheckError
        from megatron_taco.training.agreement import agree

        with contextlib.ExitStack() as stack:
            try:
                refused: list[Problem | str] = [*conflicts.check(self.config)]
                if not check_only:
                    refused += missing_files(self.config)
                if refused:
                    raise ConfigError(refused)
                device = self._device()
                if check_only:
                    stack.enter_context(self._quiet(Path(os.devnull)))
                    self._prepare(device, stack)
                    if self.ranks.rank == 0:
                        print(self.config.to_yaml(), file=self.console, end="")
                    return OK
                store = self._rendezvous()
                agree(store, self.ranks, self.config.canonical(), "configuration")
                self._make_folder()
                stack.enter_context(self._quiet(self.folder.log_path(self.ranks.rank)))
                args = self._prepare(device, stack)
                agree(store, self.ranks, {**versions(), "data": self.data_digest}, "environment")
                self._train(args, store, stack)
                return OK
            except (DataError, PatchError, FlowCheckError) as error:
                code = FAILED if isinstance(error, FlowCheckError) else USER_ERROR
                return _complain(self.ranks, error, code)
            except ConfigError:
                raise
            except Exception as error:  # the last handler of the process: say who failed and where
                self._report_failure(error)
                return FAILED

    def _device(self) -> Device:
        """The device to run on, with the environment set that has to precede CUDA's start."""
        from megatron_taco.training import megatron_args

        device = megatron_args.resolve_device(self.config)
        for name, value in megatron_args.environment(self.config, device).items():
            os.environ.setdefault(name, value)
        return device

    def _prepare(self, device: Device, stack: contextlib.ExitStack) -> argparse.Namespace:
        """Megatron's validated arguments; its own parser and rules decide."""
        if device == "cpu":
            from megatron_taco.patching.cpu import CpuShim

            shim = CpuShim().install()
            stack.callback(shim.undo)
            shim.install_megatron()
        from megatron_taco.training import megatron_args

        return megatron_args.parse(self.config, device=device, embedded=self._embedded_data())

    def _embedded_data(self) -> dict[str, str] | None:
        """Prefixes of the prepared embedded source; one process of a machine prepares it."""
        if self.config.data.source != "python-stdlib":
            return None
        from megatron_taco.data import load_tokenizer, stdlib

        named = self.config.data.tokenizer
        tokenizer = load_tokenizer(f"hf:{named.path}" if named.kind == "hf" else named.kind)
        data = stdlib.prepare(Path(self.config.data.cache), tokenizer)
        self.data_digest = data.digest
        return {"train": str(data.train_prefix), "valid": str(data.valid_prefix)}

    def _rendezvous(self) -> Any:
        """The store of the run, before any process group exists."""
        import torch.distributed as dist

        from megatron_taco.training.agreement import START_TIMEOUT

        ranks = self.ranks
        meet = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=START_TIMEOUT)
        return next(meet)[0]

    def _make_folder(self) -> None:
        if self.ranks.rank == 0:
            resume = "load" in self.config.megatron
            self.folder.create(self.config.to_yaml(), resume=resume)

    @contextlib.contextmanager
    def _quiet(self, path: Path) -> Iterator[None]:
        """Send Megatron's own output and all warnings to a file while the console shows ours."""
        if not self.config.run.quiet:
            yield
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            path.open("a", encoding="utf-8", buffering=1) as log,
            contextlib.redirect_stdout(log),
            warnings.catch_warnings(),
        ):
            handler = logging.StreamHandler(log)
            loggers = [logging.getLogger(name) for name in _LOGGED_TO_FILE]
            for logger in loggers:
                logger.addHandler(handler)
                logger.propagate = False
            logging.captureWarnings(True)
            try:
                yield
            finally:
                logging.captureWarnings(False)
                for logger in loggers:
                    logger.propagate = True
                    logger.removeHandler(handler)

    def _train(self, args: argparse.Namespace, store: Any, stack: contextlib.ExitStack) -> None:
        import torch.distributed as dist
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.global_vars import set_global_variables

        from megatron_taco.patching.registry import registry
        from megatron_taco.patching.session import Session
        from megatron_taco.patching.startup import repair
        from megatron_taco.training.datasets import train_valid_test_datasets_provider
        from megatron_taco.training.model import model_config_from_args
        from megatron_taco.training.step import forward_step

        set_global_variables(args)
        repair(registry)
        session = Session(
            self.config,
            stream=self.console,
            metrics=self.folder.metrics,
            log_interval=args.log_interval,
            last_iteration=args.train_iters,
            sequence_parallel=args.sequence_parallel,
        )
        self.session = session
        session.install(registry)
        stack.callback(session.undo)
        attention = "sdpa" if self.config.model.attention == "auto" else self.config.model.attention
        model_config = model_config_from_args(args, attention)
        try:
            pretrain(
                pretrain_cfg_container_from_args(args, model_config),
                train_valid_test_datasets_provider,
                ModelType.encoder_or_decoder,
                forward_step,
                store=store,
            )
        except SystemExit as stop:  # Megatron's exit_interval, exit_duration_in_mins, signals
            if stop.code not in (None, 0):
                raise
        session.finish()
        dist.destroy_process_group()

    def _report_failure(self, error: Exception) -> None:
        step = None if self.session is None else self.session.current_step
        text = describe(error, rank=self.ranks.rank, step=step, logs=self.folder.log_path(0).parent)
        print(text, file=sys.stderr, flush=True)
