"""The pipeline seam: boundaries in the model, messages between stages, gradients, optimiser.

GPTModel.__init__            -> ChunkBoundaries joins the chunk          (boundary_chunk)
P2PCommunicator._communicate -> messages instead of activations          (boundary_wire)
checkpoint                   -> recomputed layers find their token ids   (token_ids)
finalize_model_grads         -> projectors' gradients, whole             (boundary_gradients)
get_megatron_optimizer       -> one more optimiser in the chain          (boundary_optimizer)

Each line is a place in Megatron, what happens there, and the module that does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_taco.boundaries import Boundary, BoundarySettings, QuantizerSettings
from megatron_taco.config.pipeline_parallel import PipelineParallel
from megatron_taco.patching.boundary_agreement import check_agreement
from megatron_taco.patching.boundary_chunk import ChunkBoundaries
from megatron_taco.patching.boundary_gradients import (
    EXCHANGE,
    Groups,
    summed_statistics,
    whole_gradients,
)
from megatron_taco.patching.boundary_layout import resolve_depths, span, stage_cuts
from megatron_taco.patching.boundary_message import MessageForm
from megatron_taco.patching.boundary_report import angles, step_figures
from megatron_taco.patching.boundary_saved import check_saved
from megatron_taco.patching.boundary_wire import BACKWARD, FORWARD, Wire
from megatron_taco.patching.errors import BoundaryError
from megatron_taco.patching.registry import Registry
from megatron_taco.patching.token_ids import TokenIds
from megatron_taco.telemetry.costs import Cost
from megatron_taco.telemetry.counters import Counters, Flow

OWNER = "compression.pipeline_parallel"
LEARNED = ("mapl", "learned_unconstrained")

Hit = Callable[[], None]


def all_flows() -> list[Flow]:
    """Every flow this seam can count, in report order."""
    return [FORWARD, BACKWARD, EXCHANGE]


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
        self.chunks: list[ChunkBoundaries] = []
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
        if not self.chunks:
            self._check_saved(depths)
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
            self.cost,
            first_of_stage=not self.chunks,
        )
        chunk.attach(model)
        self.chunks.append(chunk)

    @staticmethod
    def _check_saved(depths: tuple[int, ...]) -> None:
        """Compare with the checkpoint that Megatron's training loop is about to load, if any."""
        from megatron.training.global_vars import get_args

        try:
            args = get_args()
        except AssertionError:  # Megatron's way to say that there is no training loop
            return
        check_saved(args, depths)

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
                seed=settings.seed,
                beta=settings.beta,
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
                groups = self._groups(config, kwargs.get("pg_collection"))
                # The original leaves the global batch's number of tokens in num_tokens.
                with torch.no_grad(), self.cost.timed():
                    gradients = whole_gradients(self.boundaries, groups, num_tokens, self._counters)
                    statistics = summed_statistics(self.boundaries, groups)
                self.optimizer.accept(gradients, statistics)
            return result

        return finalize_model_grads

    @staticmethod
    def _config_of(model: Any) -> Any:
        from megatron.core.utils import get_model_config

        return get_model_config(model)

    @staticmethod
    def _groups(config: Any, collection: Any) -> Groups:
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
        @functools.wraps(original)
        def get_megatron_optimizer(config: Any, *args: Any, **kwargs: Any) -> Any:
            hit()
            chain = original(config, *args, **kwargs)
            self._join(config, chain)
            return chain

        return get_megatron_optimizer

    def _join(self, config: Any, chain: Any) -> None:
        from megatron.core import parallel_state

        from megatron_taco.patching.boundary_optimizer import BoundaryOptimizer, chained

        self.optimizer = BoundaryOptimizer(
            config,
            getattr(chain, "chained_optimizers", [chain]),
            self.boundaries,
            self._settings.lr,
            parallel_state.get_model_parallel_group(),
            self._stepped,
            self.cost,
        )
        chained(chain, self.optimizer)

    def _stepped(self) -> None:
        self._steps += 1
        every = self._settings.check_every
        if every and self._steps % every == 0:
            self.check()

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
        device = torch.device(torch.cuda.current_device())
        check_agreement(self.boundaries, len(self._depths), device)
        moved = angles(self.boundaries, self._depths)
        if moved and self.note is not None:
            self.note(moved)

    def figures(self) -> dict[str, Any]:
        """The entry of a logged step; a collective call."""
        reports = {} if self.optimizer is None else self.optimizer.reports
        found = step_figures(self.boundaries, reports, self._depths)
        return {"boundaries": found} if found else {}

    def finish(self) -> None:
        """After training: the comparison that a run owes for its last steps."""
        if self._settings.check_every and self._checked < self._steps:
            self.check()

    def claim(self, registry: Registry) -> None:
        """Claim all targets but the model's construction (see ``ModelInit``)."""
        registry.claim("pipeline.communicate", OWNER, self._wire.communicate)
        registry.claim("pipeline.checkpoint", OWNER, self._ids.checkpoint)
        registry.claim("pipeline.finalize_model_grads", OWNER, self._finalize)
        registry.claim("pipeline.get_megatron_optimizer", OWNER, self._get_optimizer)
