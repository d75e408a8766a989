"""The pipeline seam: boundaries in the model, messages between stages, gradients, optimiser.

GPTModel.__init__            -> ChunkBoundaries joins the chunk          (boundary_chunk)
P2PCommunicator._communicate -> messages instead of activations          (boundary_wire)
checkpoint                   -> recomputed layers find their token ids   (token_ids)
finalize_model_grads         -> projectors' gradients, whole             (boundary_gradients)
get_megatron_optimizer       -> anchors begin as the embedding           (boundary_start)
                                one more optimiser in the chain          (boundary_optimizer)

Each line is a place in Megatron, what happens there, and the module that does it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Boundary, BoundarySettings, QuantizerSettings
from megatron_taco.boundaries.subspace import Subspace
from megatron_taco.config.pipeline_parallel import LEARNED, PipelineParallel
from megatron_taco.patching.boundary_agreement import check_agreement
from megatron_taco.patching.boundary_chunk import ANCHOR_MARK, ChunkBoundaries
from megatron_taco.patching.boundary_errors import BoundaryErrors, with_errors
from megatron_taco.patching.boundary_gradients import (
    CODEBOOK_SUM,
    EXCHANGE,
    PROJECTOR_SUM,
    Groups,
    summed_pulls,
    summed_statistics,
    whole_gradients,
)
from megatron_taco.patching.boundary_layout import resolve_depths, span, stage_cuts
from megatron_taco.patching.boundary_message import MessageForm
from megatron_taco.patching.boundary_report import angles, step_figures
from megatron_taco.patching.boundary_saved import check_saved
from megatron_taco.patching.boundary_settings import described
from megatron_taco.patching.boundary_start import share_drawn, start_anchors
from megatron_taco.patching.boundary_wire import BACKWARD, FORWARD, Wire
from megatron_taco.patching.errors import BoundaryError
from megatron_taco.patching.registry import Registry
from megatron_taco.patching.subspace_model import (
    Constrained,
    constrain,
    constrained,
    level_moments,
)
from megatron_taco.patching.token_ids import TokenIds
from megatron_taco.telemetry.costs import Cost
from megatron_taco.telemetry.counters import Counters, Flow

OWNER = "compression.pipeline_parallel"

Hit = Callable[[], None]


def all_flows() -> list[Flow]:
    """Every flow this seam can count, in report order."""
    return [FORWARD, BACKWARD, EXCHANGE, PROJECTOR_SUM, CODEBOOK_SUM]


def expected_flows(settings: PipelineParallel, stages: int) -> list[Flow]:
    """The flows that must happen in a training step: none where no stage is cut.

    Args:
        settings: of the axis.
        stages: pipeline-parallel size.
    """
    if stages == 1:
        return []
    return [FORWARD, BACKWARD, *([EXCHANGE] if settings.boundary in LEARNED else [])]


class PipelineHooks:
    """Claims every target of the pipeline seam and keeps what they share.

    Args:
        settings: of the axis.
        counters: count what is sent.

    Attributes:
        cost: what the axis costs this rank.
        chunks: the model chunks of this process that have boundaries.
        optimizer: ends the boundaries' steps, once Megatron has made its optimisers.
        note: told now and then how far projectors have moved, see ``boundary_report.angles``.
    """

    def __init__(self, settings: PipelineParallel, counters: Counters) -> None:
        self._settings, self._counters = settings, counters
        self._ids = TokenIds()
        self._form = MessageForm(None)
        self.cost = Cost(OWNER, state=self._state_bytes)
        self._wire = Wire(lambda: self._form, counters, self._end, self.cost)
        self._errors = BoundaryErrors()
        self.chunks: list[ChunkBoundaries] = []
        self._models: list[Any] = []
        self._constrained: list[Constrained] = []
        self.optimizer: Any = None
        self._steps = 0
        self._checked = 0
        self.note: Callable[[dict[str, dict[str, float]]], None] | None = None

    @property
    def boundaries(self) -> dict[int, Boundary]:
        """All boundaries of this process, by number."""
        found: dict[int, Boundary] = {}
        for chunk in self.chunks:
            found |= chunk.boundaries
        return dict(sorted(found.items()))

    @property
    def sampling(self) -> bool:
        """Whether errors are sampled in the step that runs."""
        return self._errors.sampling

    @sampling.setter
    def sampling(self, on: bool) -> None:
        self._errors.sampling = self._wire.sampling = on

    def _sample(self, boundary: Boundary, x: Tensor, ids: Tensor | None) -> None:
        if self._errors.sampling:
            self._errors.sample(boundary, x, ids, self._counters[FORWARD])

    def _state_bytes(self) -> int:
        """Bytes of projectors, anchors and codebooks with their momenta and statistics."""
        tensors = [t for c in self.chunks for t in (*c.parameters(), *c.buffers())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def model_built(self, model: Any) -> None:
        """Give a new ``GPTModel`` its boundaries; a listener of ``ModelInit``.

        Raises:
            BoundaryError: the boundaries do not fit the model or its stages.
        """
        config = model.config
        depths = resolve_depths(self._settings.after_layers, stage_cuts(config), config.num_layers)
        layers = [layer.layer_number for layer in model.decoder.layers]
        part = span(depths, layers[0] - 1, layers[-1])
        if any(chunk.span == part for chunk in self.chunks):
            raise BoundaryError(
                f"{OWNER}: a second model is built in one process, and its messages could not be "
                "told from the first one's; set mode: off for one of them"
            )
        settings = self._boundary_settings(config.hidden_size, model.vocab_size)
        chunk = ChunkBoundaries(
            settings,
            part,
            self._form_for(settings),
            self._ids,
            model.pg_collection.tp,
            config.sequence_parallel,
            self._sample,
            self.cost,
            first_of_stage=not self.chunks,
        )
        if not self.chunks:
            self._check_saved(described(settings, depths))
        chunk.attach(model)
        self.chunks.append(chunk)
        self._models.append(model)
        if settings.kind == Subspace.kind:
            self._constrained += constrained(model, depths)

    @staticmethod
    def _check_saved(here: dict[str, Any]) -> None:
        """Compare with the checkpoint that Megatron's training loop is about to load, if any."""
        from megatron.training.global_vars import get_args

        try:
            args = get_args()
        except AssertionError:  # Megatron's way to say that there is no training loop
            return
        check_saved(args, here)

    @property
    def settings(self) -> BoundarySettings:
        """Settings of the boundaries of the model that was built."""
        return self.chunks[0].chain.settings

    def _boundary_settings(self, hidden: int, vocab: int) -> BoundarySettings:
        settings = self._settings
        there, back = settings.quantizer.forward, settings.quantizer.backward
        try:
            return BoundarySettings(
                kind=settings.boundary,
                hidden=hidden,
                rank=settings.resolved_rank(),
                vocab=vocab,
                anchors=settings.resolved_anchors(),
                seed=settings.resolved_seed(),
                beta=settings.resolved_beta(),
                move_every=settings.resolved_move_every(),
                move_length=settings.resolved_move_length(),
                forward=QuantizerSettings(there.kind, there.options()),
                backward=QuantizerSettings(back.kind, back.options()),
            )
        except ValueError as error:
            raise BoundaryError(f"{OWNER}: {error}") from None

    def _form_for(self, settings: BoundarySettings) -> MessageForm:
        if not self.chunks:
            self._form = MessageForm(None if settings.anchors == "none" else settings.vocab)
        return self._form

    def _end(self, end: str) -> Boundary:
        for boundary in self.boundaries.values():
            if boundary.place.ends == end:
                return boundary
        raise BoundaryError(
            f"{OWNER}: this process is no {end} of any boundary, but Megatron's communicator "
            "sends or receives as one; was the model built before compression was installed?"
        )

    def _finalize(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def finalize_model_grads(
            model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            hit()
            result = original(model, num_tokens, *args, **kwargs)
            if self.optimizer is not None:
                config = self._config_of(model[0])
                groups = self.groups(config, kwargs.get("pg_collection"))
                # The original leaves the global batch's number of tokens in num_tokens.
                with torch.no_grad(), self.cost.timed():
                    gradients = whole_gradients(self.boundaries, groups, num_tokens, self._counters)
                    gradients |= summed_pulls(self.boundaries, groups, self._counters)
                    statistics = summed_statistics(self.boundaries, groups, self._counters)
                self.optimizer.accept(gradients, statistics)
            return result

        return finalize_model_grads

    @staticmethod
    def _config_of(model: Any) -> Any:
        from megatron.core.utils import get_model_config

        return get_model_config(model)

    @staticmethod
    def groups(config: Any, collection: Any) -> Groups:
        """Where projectors' gradients have their parts.

        Args:
            config: Megatron's ``TransformerConfig``.
            collection: its process groups; None for those of its ``parallel_state``.
        """
        from megatron.core.process_groups_config import ProcessGroupCollection

        if collection is None:
            collection = ProcessGroupCollection.use_mpu_process_groups(
                required_pgs=["tp", "pp", "dp_cp"]
            )
        replicas = [collection.dp_cp]
        if config.sequence_parallel:
            replicas.append(collection.tp)
        scale = 1.0 if config.calculate_per_token_loss else 1.0 / collection.dp_cp.size()
        return Groups(tuple(replicas), scale, collection.pp)

    def _get_optimizer(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
            hit()
            given = signature.bind(*args, **kwargs)
            config = given.arguments["config"]
            self._start()
            overrides = given.arguments.get("config_overrides")
            given.arguments["config_overrides"] = self._overrides(config, overrides)
            chain = original(*given.args, **given.kwargs)
            self._join(config, chain)
            return chain

        return get_megatron_optimizer

    def _start(self) -> None:
        """Set what depends on the weights, before the optimiser makes its masters of them."""
        with torch.no_grad():
            model, chains = self._models[0], [chunk.chain for chunk in self.chunks]
            share_drawn(chains, self._copy(), torch.device(torch.cuda.current_device()))
            start_anchors(
                chains,
                model.embedding.word_embeddings.weight if model.pre_process else None,
                model.pg_collection.tp,
                model.pg_collection.pp,
            )
            self._constrain()

    @staticmethod
    def _copy() -> int:
        """Number of this process among those that hold the same part of the model."""
        from megatron.core import parallel_state as mpu

        replica: int = mpu.get_data_parallel_rank(with_context_parallel=True)
        tensor: int = mpu.get_tensor_model_parallel_rank()
        return replica * mpu.get_tensor_model_parallel_world_size() + tensor

    @staticmethod
    def _overrides(config: Any, overrides: Any) -> dict[Any, Any]:
        """Megatron's rules by parameter, and one that no anchor's table decays."""
        from megatron.core.optimizer import get_standard_config_overrides
        from megatron.core.optimizer.optimizer_config import ParamKey

        rules = dict(get_standard_config_overrides(config) if overrides is None else overrides)
        rules[ParamKey(attr=ANCHOR_MARK)] = {"wd_mult": 0.0}
        return rules

    def _constrain(self) -> None:
        """Put a subspace network's weights back into its subspace."""
        subspaces = [each for each in self.boundaries.values() if isinstance(each, Subspace)]
        if subspaces:
            constrain(self._constrained, subspaces[0])
            if self.optimizer is not None:
                level_moments(self._constrained, subspaces[0], self.optimizer.others)

    def _join(self, config: Any, chain: Any) -> None:
        from megatron.core import parallel_state

        from megatron_taco.patching.boundary_optimizer import BoundaryOptimizer, chained

        self.optimizer = BoundaryOptimizer(
            config,
            getattr(chain, "chained_optimizers", [chain]),
            self.boundaries,
            self._settings.resolved_lr(),
            parallel_state.get_model_parallel_group(),
            self._stepped,
            self.cost,
        )
        chained(chain, self.optimizer)

    def _stepped(self) -> None:
        self._constrain()
        self._steps += 1
        every = self._settings.resolved_check_every()
        if every and self._steps % every == 0:
            self.check()
        elif every and self._steps == 1:
            # Devices that round the same products differently show it at once.
            self._compare()

    @property
    def _depths(self) -> tuple[int, ...]:
        return self.chunks[0].span.depths

    def check(self) -> None:
        """Compare what all ranks hold of each boundary, and note how far projectors moved.

        A collective call.

        Raises:
            DisagreementError: two of them differ.
        """
        self._checked = self._steps
        self._compare()
        moved = angles(self.boundaries, self._depths)
        if moved and self.note is not None:
            self.note(moved)

    def _compare(self) -> None:
        device = torch.device(torch.cuda.current_device())
        check_agreement(self.boundaries, len(self._depths), device)

    def never_passed(self) -> list[int]:
        """Depths of the boundaries that no training pass has gone through; a collective call."""
        passed = torch.zeros(len(self._depths), device=torch.cuda.current_device())
        for chunk in self.chunks:
            for number in chunk.passed:
                passed[number - 1] = 1.0
        dist.all_reduce(passed, op=dist.ReduceOp.MAX)
        return [d for d, seen in zip(self._depths, passed.tolist(), strict=True) if not seen]

    def figures(self) -> dict[str, Any]:
        """The entry of a logged step; a collective call."""
        reports = {} if self.optimizer is None else self.optimizer.reports
        found = step_figures(self.boundaries, reports, self._depths)
        found = with_errors(found, self._errors.take(len(self._depths)), self._depths)
        return {"boundaries": found} if found else {}

    def finish(self) -> None:
        """After training: the comparison that a run owes for its last steps."""
        if self._settings.resolved_check_every() and self._checked < self._steps:
            self.check()

    def claim(self, registry: Registry) -> None:
        """Claim all targets but the model's construction (see ``ModelInit``)."""
        registry.claim("pipeline.communicate", OWNER, self._wire.communicate)
        registry.claim("pipeline.checkpoint", OWNER, self._ids.checkpoint)
        registry.claim("pipeline.finalize_model_grads", OWNER, self._finalize)
        registry.claim("pipeline.get_megatron_optimizer", OWNER, self._get_optimizer)
