"""One training run from its configuration file to its end table."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from megatron_taco.config import Config, ConfigError, load
from megatron_taco.config.files import missing_files
from megatron_taco.training.embedded import embedded_data
from megatron_taco.training.failures import describe
from megatron_taco.training.launch_env import Ranks, ranks_from_environment, started_by_launcher
from megatron_taco.training.megatron_args import Device
from megatron_taco.training.megatron_failures import describe_known
from megatron_taco.training.quiet import quiet
from megatron_taco.training.run_folder import RunFolder, versions

if TYPE_CHECKING:
    from megatron_taco.patching.session import Session

OK, FAILED, USER_ERROR = 0, 1, 2


def run(
    path: str,
    overrides: Sequence[str],
    *,
    check_only: bool = False,
    make_session: Callable[..., Session] | None = None,
) -> int:
    """Train as ``path`` says; returns the exit code.

    Args:
        path: the YAML file.
        overrides: ``dotted.key=value`` strings.
        check_only: stop after Megatron's own parser has accepted the configuration.
        make_session: makes the session from the arguments of :class:`Session`, by default that
            class; for programs that measure.
    """
    launched = started_by_launcher()
    ranks = ranks_from_environment()
    try:
        this = _Run(load(path, overrides), ranks, sys.stdout, make_session)
        return this.check(launched=launched) if check_only else this.execute()
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

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        console: IO[str],
        make_session: Callable[..., Session] | None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.console = console
        self.make_session = make_session
        self.folder = RunFolder(config.run.folder)
        self.session: Session | None = None
        self.data_digest: str | None = None

    def check(self, *, launched: bool) -> int:
        """Check the configuration and print it resolved; no data and no other rank is needed."""
        from megatron_taco.training import megatron_args

        with contextlib.ExitStack() as stack:
            device = self._device()
            stack.enter_context(self._quiet(io.StringIO()))
            self._shim(device, stack)
            size = None if launched else megatron_args.smallest_world_size(self.config)
            args = megatron_args.parse(self.config, device=device, world_size=size)
            self._refuse_conflicts(args)
        if self.ranks.rank == 0:
            print(self.config.to_yaml(), file=self.console, end="")
        return OK

    def execute(self) -> int:
        """Check, agree, train; see :func:`run`."""
        from torch.distributed.checkpoint import CheckpointException

        from megatron_taco.data import DataError
        from megatron_taco.patching.errors import PatchError
        from megatron_taco.patching.flows import FlowCheckError
        from megatron_taco.training.agreement import agree

        with contextlib.ExitStack() as stack:
            try:
                missing = missing_files(self.config)
                if missing:
                    raise ConfigError(missing)
                device = self._device()
                store = self._rendezvous()
                agree(store, self.ranks, self.config.canonical(), "configuration")
                start_up_output = io.StringIO()
                with self._quiet(start_up_output):
                    self._shim(device, stack)
                    args = self._parse(device)
                facts = {**versions(), "data": self.data_digest, "device": device}
                agree(store, self.ranks, facts, "environment")
                log = stack.enter_context(self._claim_folder(store))
                log.write(start_up_output.getvalue())
                stack.enter_context(self._quiet(log))
                self._train(args, store, stack)
                return OK
            except (DataError, PatchError, FlowCheckError) as error:
                code = FAILED if isinstance(error, FlowCheckError) else USER_ERROR
                return _complain(self.ranks, error, code)
            except ConfigError:
                raise
            # The last handler of the process: say who failed and where. What torch's checkpoints
            # raise is no Exception.
            except (Exception, CheckpointException) as error:
                known = describe_known(error)
                if known is not None:
                    return _complain(self.ranks, ConfigError(known), USER_ERROR)
                self._report_failure(error)
                return FAILED

    def _device(self) -> Device:
        """The device to run on, with the environment set that has to precede CUDA's start."""
        from megatron_taco.training import megatron_args

        device = megatron_args.resolve_device(self.config)
        for name, value in megatron_args.environment(self.config, device).items():
            os.environ.setdefault(name, value)
        return device

    def _quiet(self, stream: IO[str]) -> contextlib.AbstractContextManager[None]:
        return quiet(stream) if self.config.run.quiet else contextlib.nullcontext()

    @staticmethod
    def _shim(device: Device, stack: contextlib.ExitStack) -> None:
        if device == "cpu":
            from megatron_taco.patching.cpu import CpuShim

            shim = CpuShim().install()
            stack.callback(shim.undo)
            shim.install_megatron()

    def _parse(self, device: Device) -> argparse.Namespace:
        """Megatron's validated arguments; its own parser and rules decide, then the data's."""
        from megatron_taco.patching import data_conflicts
        from megatron_taco.training import data_checks, megatron_args

        args = megatron_args.parse(self.config, device=device, embedded=self._embedded_data())
        self._refuse_conflicts(args)
        if alone := data_conflicts.check_size(self.config, vars(args)):
            raise ConfigError(alone)
        problems = data_checks.check(self.config, args)
        if problems:
            raise ConfigError(problems)
        return args

    def _refuse_conflicts(self, args: argparse.Namespace) -> None:
        """Refuse what does not go with compression; after Megatron has taken the arguments."""
        from megatron_taco.patching import conflicts, pipeline_conflicts

        refused = conflicts.check(self.config)
        refused = refused or pipeline_conflicts.check_stages(self.config, args)
        if refused:
            raise ConfigError(refused)

    def _embedded_data(self) -> dict[str, str] | None:
        """Prefixes of the prepared embedded source; one process of a machine prepares it."""
        data = embedded_data(self.config)
        if data is None:
            return None
        self.data_digest = data.digest
        return data.prefixes

    def _rendezvous(self) -> Any:
        """The store of the run, before any process group exists."""
        import torch.distributed as dist

        from megatron_taco.training.agreement import START_TIMEOUT

        ranks = self.ranks
        try:
            meet = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=START_TIMEOUT)
            return next(meet)[0]
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise ConfigError(
                f"rank {ranks.rank} of {ranks.world_size} could not meet the others at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
                f"{START_TIMEOUT.total_seconds():.0f} s; did all ranks start? "
                f"({str(error).splitlines()[0]})"
            ) from error

    @contextlib.contextmanager
    def _claim_folder(self, store: Any) -> Any:
        """Rank 0 makes the run folder and keeps others out; then every rank opens its log in it."""
        from megatron_taco.data import DataError

        with contextlib.ExitStack() as stack:
            said = "ready"
            if self.ranks.rank == 0:
                resume = self.config.megatron.get("load") is not None
                try:
                    stack.enter_context(self.folder.claimed(self.config.to_yaml(), resume=resume))
                except (OSError, DataError) as error:
                    said = f"{self.config.where('run.dir')}: run.dir: {error}"
                store.set("megatron_taco/folder", said)
            said = store.get("megatron_taco/folder").decode()
            if said != "ready":
                raise ConfigError(said)
            path = self.folder.log_path(self.ranks.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            yield stack.enter_context(path.open("a", encoding="utf-8", buffering=1))

    def _train(self, args: argparse.Namespace, store: Any, stack: contextlib.ExitStack) -> None:
        import torch.distributed as dist
        from megatron.training.global_vars import set_global_variables

        from megatron_taco.patching.boundary_saved import check_saved
        from megatron_taco.patching.conflicts import TE_IMPL
        from megatron_taco.patching.registry import registry
        from megatron_taco.patching.session import Session
        from megatron_taco.patching.startup import repair
        from megatron_taco.patching.transformer_engine import quantised_gathers
        from megatron_taco.training.loop import train

        set_global_variables(args)
        repair(registry)
        if not self.config.compression.pipeline_parallel.enabled:
            check_saved(args, {})
        session = (self.make_session or Session)(
            self.config,
            stream=self.console,
            metrics=self.folder.metrics,
            log_interval=args.log_interval,
            sequence_parallel=args.sequence_parallel,
            learned_positions=args.position_embedding_type == "learned_absolute",
            distributed_optimizer=args.use_distributed_optimizer,
            seed=args.seed,
            policy_file=self.folder.policy,
            stages=args.pipeline_model_parallel_size,
            transformer_engine=args.transformer_impl == TE_IMPL,
            quantised_gathers=quantised_gathers(args),
        )
        self.session = session
        session.install(registry)
        stack.callback(session.undo)
        try:
            train(args, self.config.model.layers(args.transformer_impl), store)
        except SystemExit as stop:  # Megatron's exit_interval, exit_duration_in_mins, signals
            if stop.code not in (None, 0):
                raise
        session.finish()
        dist.destroy_process_group()

    def _report_failure(self, error: BaseException) -> None:
        step = None if self.session is None else self.session.current_step
        text = describe(error, rank=self.ranks.rank, step=step, logs=self.folder.log_path(0).parent)
        print(text, file=sys.stderr, flush=True)
