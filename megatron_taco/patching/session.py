"""One run's compression, put into this process and taken out again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import yaml

from megatron_taco import compressors
from megatron_taco.collectives.router import Router
from megatron_taco.config import Settings
from megatron_taco.patching import data_flows, pipeline_conflicts, tensor
from megatron_taco.patching.data_local import LocalSteps
from megatron_taco.patching.data_memory import GradientMemory
from megatron_taco.patching.data_policy import BucketPolicy
from megatron_taco.patching.data_session import data_parallel_checks, data_parallel_hooks
from megatron_taco.patching.data_trial import compile_kernels
from megatron_taco.patching.flows import FlowCheck, FlowCheckError, StepCheck
from megatron_taco.patching.loop import LoopHooks, StepListener
from megatron_taco.patching.model_init import TARGET as MODEL_INIT
from megatron_taco.patching.model_init import Listener, ModelInit
from megatron_taco.patching.pipeline_session import (
    pipeline_checks,
    pipeline_flows,
    pipeline_hooks,
)
from megatron_taco.patching.preparation import Preparation
from megatron_taco.patching.registry import Applied, Registry
from megatron_taco.patching.run_facts import current_device
from megatron_taco.patching.transformer_engine import TransformerEngineHooks, check_model
from megatron_taco.telemetry.costs import Cost
from megatron_taco.telemetry.counters import Counters, Flow
from megatron_taco.telemetry.reporter import Reporter


def tensor_parallel_router(
    config: Settings, counters: Counters, router_type: type[Router] = Router
) -> Router:
    """The router of the tensor-parallel axis from ``compression.tensor_parallel``."""
    settings = config.compression.tensor_parallel
    roles = {
        "tp.forward": settings.forward,
        "tp.backward": settings.backward,
        "tp.embedding": settings.embedding,
        "tp.output_layer": settings.output_layer,
    }
    return router_type(
        compressor=compressors.build(settings.compressor, **settings.settings()),
        algorithm=settings.algorithm,
        roles=frozenset(role for role, on in roles.items() if on),
        min_bytes=settings.min_bytes,
        start_step=settings.start_step,
        counter=lambda role, collective: counters[Flow(role, collective)],
    )


DATA_POLICY = "data-policy.json"
"""Where the policy of the data-parallel axis is kept, beside that of the tensor-parallel one."""


class PipelineAxis(Protocol):
    """What a session needs of its pipeline boundaries; see :class:`pipeline.PipelineHooks`."""

    sampling: bool

    def model_built(self, model: Any) -> None:
        """Give a new ``GPTModel`` its boundaries."""

    def claim(self, registry: Registry) -> None:
        """Claim all targets but the model's construction."""

    def never_passed(self) -> list[int]:
        """Depths of the boundaries that no training pass has gone through; a collective call."""

    def finish(self) -> None:
        """After training: what is still owed."""


class DataAxis(Protocol):
    """What a session needs of its data-parallel hooks; see :class:`data.DataParallelHooks`."""

    @property
    def local(self) -> LocalSteps | None:
        """The local steps of replicas, where they take any."""

    def begin_step(self, step: int, sampling: bool) -> None:
        """Before a training step, counted from 0; ``sampling`` if errors are sampled in it."""

    def end_step(self, step: int) -> None:
        """After a step of replicas that step apart."""

    def claim(self, registry: Registry) -> None:
        """Claim all targets."""


class Session:
    """Everything that one run installs: hooks of the axes that are on, and the loop's hooks.

    Args:
        config: the run's configuration.
        stream: where rank 0's console lines go.
        metrics: path of ``metrics.jsonl``, or None.
        log_interval: steps between two reports.
        sequence_parallel: whether activations are split over the sequence.
        learned_positions: whether positions are embedded.
        distributed_optimizer: whether gradients are reduce-scattered and weights gathered.
        seed: of the run; random rounding is keyed by it.
        router_type: what routes the collectives; a program that measures brings its own.
        step_listeners: called with the step, counted from 0, before each training step, once the
            session has prepared it.
        policy_file: where rank 0 keeps the policy of ``auto``, or None.
        stages: pipeline-parallel size.
        knows_messages: whether Megatron's arguments are there, as in any loop of
            ``megatron.training``; ``auto`` needs them.
        transformer_engine: whether layers may be Transformer Engine's.
        quantised_gathers: whether Transformer Engine gathers FP8 or FP4 between them.

    Attributes:
        boundaries: the pipeline's hooks, or None; a program that measures sets its own before
            ``install``.
        data_parallel: the data-parallel hooks, likewise.
    """

    def __init__(
        self,
        config: Settings,
        *,
        stream: IO[str],
        metrics: Path | None,
        log_interval: int,
        sequence_parallel: bool,
        learned_positions: bool,
        distributed_optimizer: bool,
        seed: int,
        router_type: type[Router] = Router,
        step_listeners: Sequence[StepListener] = (),
        policy_file: Path | None = None,
        stages: int = 1,
        knows_messages: bool = True,
        transformer_engine: bool = False,
        quantised_gathers: bool = False,
    ) -> None:
        settings = config.compression.tensor_parallel
        compressing = settings.enabled
        flows = tensor.all_flows() if compressing else []
        data_settings = config.compression.data_parallel
        if data_settings.enabled:
            flows += data_flows.all_flows(data_settings.gradients.method)
        flows += pipeline_flows(config)
        self.counters = Counters(flows)
        boundaries = pipeline_hooks(config, self.counters)
        self.boundaries: PipelineAxis | None = boundaries
        self.reporter = Reporter(
            counters=self.counters,
            stream=stream,
            metrics=metrics,
            log_interval=log_interval,
            extra=None if boundaries is None else boundaries.figures,
            describe=self._describe,
        )
        self._config, self._knows_messages = config, knows_messages
        self.costs: list[Cost] = []
        self._steps = 0
        self._applied: Applied | None = None
        self._registry: Registry | None = None
        self.router: Router | None = None
        self.check: FlowCheck | None = None
        self._preparation: Preparation | None = None
        if compressing:
            router = tensor_parallel_router(config, self.counters, router_type)
            self.costs.append(Cost("compression.tensor_parallel"))
            router.watcher = self.costs[-1]
            self.router = router
            expected = tensor.expected_flows(
                sequence_parallel=sequence_parallel,
                learned_positions=learned_positions,
                router=router,
                quantised_gathers=quantised_gathers,
            )
            self.check = FlowCheck(
                totals=self.reporter.totals,
                expected=expected,
                start_step=router.start_step,
                min_bytes=router.min_bytes,
                plain_passes=settings.mode == "auto",
            )
            self._preparation = Preparation(
                router=router,
                settings=settings,
                flows=expected,
                sampling=config.telemetry.error_every > 0,
                policy_file=policy_file,
                say=self.reporter.say,
                show=self.reporter.show,
                knows_messages=knows_messages,
            )
        if boundaries is not None:
            boundaries.note = self._note_angles
            self.costs.append(boundaries.cost)
        data_parallel = data_parallel_hooks(
            config, self.counters, seed, distributed_optimizer=distributed_optimizer
        )
        self.data_parallel: DataAxis | None = data_parallel
        self.axis_checks: list[StepCheck] = [
            *pipeline_checks(
                config,
                totals=self.reporter.totals,
                stages=stages,
                never_passed=lambda: (
                    [] if self.boundaries is None else self.boundaries.never_passed()
                ),
            )
        ]
        self._bucket_policy: BucketPolicy | None = None
        self._compile_for_buckets: Callable[[], str] | None = None
        if data_parallel is not None:
            self._compile_for_buckets = functools.partial(
                compile_kernels, data_parallel, distributed_optimizer=distributed_optimizer
            )
        if data_parallel is not None and data_settings.mode == "auto":
            self._bucket_policy = BucketPolicy(
                data_parallel,
                data_settings,
                distributed_optimizer=distributed_optimizer,
                file=policy_file and policy_file.with_name(DATA_POLICY),
                say=self.reporter.say,
                show=self.reporter.show,
            )
        self._memory: GradientMemory | None = None
        if data_parallel is not None and data_settings.gradients.method is not None:
            self._memory = GradientMemory(
                data_parallel,
                data_settings.gradients.method,
                fresh=data_settings.gradients.memory == "fresh",
                say=self.reporter.say,
            )
        if data_parallel is not None:
            self.costs.append(data_parallel.cost)
            self.axis_checks += data_parallel_checks(
                data_parallel,
                config,
                totals=self.reporter.totals,
                distributed_optimizer=distributed_optimizer,
            )
        self.current_step: int | None = None
        self._step_listeners = tuple(step_listeners)
        self._transformer_engine = transformer_engine
        self._forward_chunks = config.compression.tensor_parallel.forward_chunks
        self._error_every = config.telemetry.error_every

    def _describe(self) -> dict[str, Any]:
        """The resolved configuration and, under ``auto``, the policies."""
        described: dict[str, Any] = {"configuration": yaml.safe_load(self._config.to_yaml())}
        if self.router is not None and self.router.policy is not None:
            described["policy"] = self.router.policy.to_dict()
        if self._bucket_policy is not None and self._bucket_policy.policy is not None:
            described["data_policy"] = self._bucket_policy.policy.to_dict()
        return described

    def _note_angles(self, angles: dict[str, dict[str, float]]) -> None:
        self.reporter.note("projectors", self.current_step or 0, angles=angles)

    def _begin_step(self, step: int) -> None:
        if self.current_step is None:
            self._check_model_is_known()
            if step:
                self.reporter.resumed(step)
            self._prepare()
            if self._compile_for_buckets is not None and current_device().type == "cuda":
                self.reporter.say(self._compile_for_buckets())
            if self._bucket_policy is not None:
                self._bucket_policy.run()
            for line in self._warnings():
                self.reporter.say(f"warning: {line}")
            if self._memory is not None:
                from megatron.training import get_args

                self._memory.resume(get_args())
        self.current_step = step + 1
        self._steps += 1
        sampling = bool(self._error_every) and step % self._error_every == 0
        if self.router is not None:
            self.router.step = step
            self.router.sampling = sampling
        if self.boundaries is not None:
            self.boundaries.sampling = sampling
        if self.data_parallel is not None:
            self.data_parallel.begin_step(step, sampling)
        for listener in self._step_listeners:
            listener(step)

    def _warnings(self) -> list[str]:
        """What this run does otherwise than its configuration seems to say."""
        if self.boundaries is None or not self._knows_messages:
            return []
        from megatron.training import get_args

        return pipeline_conflicts.notes(self._config, get_args().train_iters)

    def _begin_evaluation(self, done: int) -> None:
        self._prepare()
        if self.router is not None:
            self.router.step = done
            self.router.sampling = False

    def _prepare(self) -> None:
        """Before the first step or evaluation; does nothing after that."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.run()

    def _check_model_is_known(self) -> None:
        """Without its name the output layer would be taken for a hidden layer and compressed."""
        registry = self._registry
        sections = ["compression.tensor_parallel"] if self.router is not None else []
        sections += ["compression.pipeline_parallel"] if self.boundaries is not None else []
        if sections and registry and not registry.hits.get(MODEL_INIT):
            raise FlowCheckError(
                f"{', '.join(sections)}: no GPTModel was built after compression was "
                "installed; install it before the model is built (only Megatron's GPTModel is "
                "supported)"
            )

    def install(self, registry: Registry) -> None:
        """Claim and apply all hooks; raises a ``PatchError`` before anything is changed."""
        listeners: list[Listener] = []
        if self.router is not None:
            hooks = tensor.TensorParallelHooks(self.router, self._forward_chunks)
            hooks.claim(registry)
            listeners.append(tensor.TensorParallelHooks.model_built)
            if self._transformer_engine:
                TransformerEngineHooks(hooks).claim(registry)
            listeners.append(functools.partial(check_model, hooked=self._transformer_engine))
        if self.boundaries is not None:
            self.boundaries.claim(registry)
            listeners.append(self.boundaries.model_built)
        if listeners:
            ModelInit(listeners).claim(registry)
        if self.data_parallel is not None:
            self.data_parallel.claim(registry)
        if self._memory is not None:
            self._memory.claim(registry)
        axis = self.data_parallel
        local = None if axis is None else axis.local
        LoopHooks(
            self.reporter,
            self._begin_step,
            self._begin_evaluation,
            (self.check, *self.axis_checks),
            see_optimizer=None if local is None else local.attach,
            end_step=None if axis is None or local is None else axis.end_step,
        ).claim(registry)
        self._registry = registry
        self._applied = registry.apply()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One training step, counted from 0, of a loop that does not use Megatron's.

        Raises:
            FlowCheckError: after the second step, if something that is on was never compressed.
        """
        self._begin_step(number)
        yield
        if self.check is not None:
            self.check.step_done(number, skipped=False)

    def finish(self) -> None:
        """After training: the checks a short run still owes, and the end table (all ranks)."""
        for check in (self.check, *self.axis_checks):
            if check is not None:
                check.finish()
        if self.boundaries is not None:
            self.boundaries.finish()
        self.reporter.finish(self.costs, self._steps)

    def undo(self) -> None:
        """Restore the very objects that were replaced."""
        if self._applied is not None and self._registry is not None:
            self._applied.undo()
            self._registry.clear()
            self._applied = None
