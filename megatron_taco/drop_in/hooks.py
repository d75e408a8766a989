"""Puts compression into a training that somebody else set up.

What it needs to know is in Megatron's arguments, which the script has yet to parse.  So nothing but
two functions of Megatron is wrapped at first, whenever ``megatron.training`` gets imported:
``setup_model_and_optimizer``, before which the arguments and the process groups exist and no model
does, starts the session; ``pretrain`` ends it with the end table.  A loop that uses neither calls
:meth:`DropIn.start` and :meth:`DropIn.finish` itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from megatron_taco import __version__
from megatron_taco.config import ConfigError, Settings
from megatron_taco.drop_in.facts import Facts, default_run_dir, facts_of_megatron, facts_of_model
from megatron_taco.drop_in.refusals import exit_on_refusal
from megatron_taco.patching.after_import import AfterImport

if TYPE_CHECKING:
    from megatron_taco.patching.cpu import CpuShim
    from megatron_taco.patching.session import Session

OWNER = "drop-in"
_MODE = "compression.tensor_parallel.mode"
_RESTART = (
    "--inprocess-restart does not go with compression: it builds process groups and model again "
    "in a process whose hooks keep the old ones; leave it out, or compression off"
)

Hit = Callable[[], None]


class DropIn:
    """Compression for one training; made by :func:`megatron_taco.install` and the launcher.

    Args:
        settings: what to compress and what to record.
        run_dir: folder for the figures, or None for the default.
        device: ``cpu`` to run Megatron without a GPU.
        exit_on_mistake: end the process where ``pretrain`` would let a refusal of ours through.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        run_dir: Path | None,
        device: Literal["cpu"] | None,
        exit_on_mistake: bool,
    ) -> None:
        self.settings = settings
        self._refusals = exit_on_refusal if exit_on_mistake else contextlib.nullcontext
        self._run_dir = run_dir
        self._device = device
        self._session: Session | None = None
        self._finished = False
        self._waiting: AfterImport | None = None
        self._stack = contextlib.ExitStack()

    @property
    def started(self) -> bool:
        """Whether a training has begun under these settings."""
        return self._session is not None

    def install(self) -> Self:
        """Wait for Megatron; nothing of it is imported or replaced before the script does so.

        Raises:
            PatchError: Megatron is loaded already, and is not one that we know.
        """
        shim = self._cpu_shim()
        waiting = AfterImport(
            "megatron.training.training", functools.partial(self._loop_is_there, shim)
        )
        self._waiting = waiting.install()
        self._stack.callback(waiting.undo)
        return self

    def _cpu_shim(self) -> CpuShim | None:
        if self._device is None:
            return None
        for name, value in (("TORCHDYNAMO_DISABLE", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")):
            os.environ.setdefault(name, value)
        from megatron_taco.patching.cpu import CpuShim

        shim = CpuShim().install()
        self._stack.callback(shim.undo)
        return shim

    def _loop_is_there(self, shim: CpuShim | None) -> None:
        """``megatron.training.training`` has been executed; its importers have not gone on yet."""
        from megatron_taco.patching.registry import Registry
        from megatron_taco.patching.startup import repair

        if shim is not None:
            shim.install_megatron()
        registry = Registry()
        registry.claim("startup.setup_model_and_optimizer", OWNER, self._start_before)
        registry.claim("startup.pretrain", OWNER, self._finish_after)
        self._stack.callback(registry.apply().undo)  # a Megatron that is not known goes no further
        self._rebind_importers()
        repairs = Registry()
        repair(repairs)
        self._stack.callback(repairs.apply().undo)

    def _rebind_importers(self) -> None:
        """Modules of the script's may have imported the two functions by value before."""
        loop = sys.modules["megatron.training.training"]
        ours = [loop.setup_model_and_optimizer, loop.pretrain]
        by_original = {id(function.__wrapped__): function for function in ours}
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in by_original:
                    setattr(module, name, by_original[id(value)])
                    self._stack.callback(setattr, module, name, value)

    def _start_before(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            hit()
            if self._session is None:
                self._start(facts_of_megatron())
            return original(*args, **kwargs)

        return setup_model_and_optimizer

    def _finish_after(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def pretrain(*args: Any, **kwargs: Any) -> Any:
            hit()
            with self._refusals():
                try:
                    result = original(*args, **kwargs)
                except SystemExit as stop:  # Megatron's exit_interval, exit_duration, signals
                    if stop.code in (None, 0):
                        self.finish()
                    raise
                self.finish()
                return result

        return pretrain

    def start(
        self,
        model_config: Any,
        *,
        position_embedding_type: str = "learned_absolute",
        save: str | Path | None = None,
    ) -> None:
        """Begin compressing, in a loop that does not use ``megatron.training``; all ranks call it.

        Call it when the process groups exist (``parallel_state.initialize_model_parallel``) and
        before ``GPTModel`` is built.

        Args:
            model_config: Megatron's ``TransformerConfig``.
            position_embedding_type: as it is given to ``GPTModel``.
            save: folder of the checkpoints; the figures go into it unless ``run_dir`` was given.

        Raises:
            ConfigError: the ranks differ, or something does not go with compression.
            PatchError: this Megatron is not one that we know.
            RuntimeError: it has begun already.
        """
        if self._session is not None:
            raise RuntimeError("compression has begun already; call start() once")
        folder = None if save is None else Path(save)
        self._start(facts_of_model(model_config, position_embedding_type, folder))

    def _start(self, facts: Facts) -> None:
        from megatron_taco.drop_in.meeting import meet
        from megatron_taco.patching.boundary_saved import check_saved
        from megatron_taco.patching.conflicts import check_arguments
        from megatron_taco.patching.pipeline_conflicts import check_stages
        from megatron_taco.patching.registry import registry
        from megatron_taco.patching.session import Session

        refused = check_arguments(self.settings, facts.arguments)
        tensor = self.settings.compression.tensor_parallel
        if self.settings.compression.enabled and facts.arguments.get("inprocess_restart"):
            refused.append(_RESTART)
        if tensor.mode == "auto" and not facts.megatron_training:
            refused.append(
                f"{_MODE}: auto ({self.settings.where(_MODE)}) measures the messages that "
                "Megatron's arguments tell, and a loop over megatron.core alone has none; "
                "set mode: on"
            )
        data = self.settings.compression.data_parallel
        if data.enabled and not facts.megatron_training:
            refused.append(
                "compression.data_parallel: a loop over megatron.core alone can have its "
                "tensor-parallel traffic compressed, not yet its data-parallel traffic; set mode: "
                "off"
            )
        boundaries = self.settings.compression.pipeline_parallel
        if boundaries.enabled and not facts.megatron_training:
            refused.append(
                "compression.pipeline_parallel: a loop over megatron.core alone cannot have "
                "pipeline boundaries yet; set mode: off"
            )
        if not refused:
            refused = check_stages(self.settings, Namespace(**facts.arguments))
        if refused:
            raise ConfigError(refused)
        if facts.megatron_training and not boundaries.enabled:
            from megatron.training import get_args

            check_saved(get_args(), {})
        path = self._run_dir or default_run_dir(facts)
        folder = self._stack.enter_context(meet(self.settings, path, resumes=facts.resumes))
        session = Session(
            self.settings,
            stream=sys.stdout,
            metrics=folder.metrics,
            log_interval=facts.log_interval,
            sequence_parallel=facts.sequence_parallel,
            learned_positions=facts.learned_positions,
            distributed_optimizer=facts.distributed_optimizer,
            seed=facts.seed,
            policy_file=folder.policy,
            stages=facts.arguments.get("pipeline_model_parallel_size") or 1,
            knows_messages=facts.megatron_training,
            transformer_engine=facts.transformer_engine,
            quantised_gathers=facts.quantised_gathers,
        )
        session.install(registry)
        self._stack.callback(session.undo)
        self._session = session
        others = data.enabled or boundaries.enabled
        what = "off" if others else "off: nothing is compressed"
        if tensor.enabled:
            what = f"{tensor.mode} ({tensor.compressor} {tensor.format}, block {tensor.block})"
        if data.enabled:
            what += f", data_parallel {data.mode}"
        if boundaries.enabled:
            what += f", pipeline_parallel {boundaries.boundary}"
        session.reporter.say(f"megatron_taco {__version__}: {_MODE} {what}; figures in {path}")

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One training step of a loop that does not use Megatron's ``train_step``.

        Args:
            number: the step, counted from 0; after a resume the first one is not 0.

        Raises:
            FlowCheckError: after the second step, if something that is on was never compressed.
        """
        if self._session is None:
            raise RuntimeError("call start() before the first step")
        with self._session.step(number):
            yield

    def finish(self) -> None:
        """After training: the checks that a short run still owes, and the end table (all ranks).

        Raises:
            FlowCheckError: something that is on was never seen, or never compressed.
        """
        if self._session is not None and not self._finished:
            self._finished = True
            self._session.finish()

    def undo(self) -> None:
        """Put the very objects back that were replaced, and let go of the run folder."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
