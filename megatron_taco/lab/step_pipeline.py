"""Pipeline stages in turns: a model for each kind of boundary, and messages of no size.

A boundary is part of the model, so each of its kinds is trained as a model of its own, with an
optimiser of its own, built by Megatron's own function in the same processes. They take turns.

*Silent* keeps every message and its place in the schedule, and makes it one element long: a stage
still waits until its neighbour has computed, so the pipeline's own idle time stays, and what is
missing of a step is what the bytes cost. Were the messages left out, stages would run ahead of what
they need, and that idle time would count as communication.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_taco.config import Config
from megatron_taco.lab.step_schedule import PLAIN, SILENT
from megatron_taco.lab.step_switch import OWNER, Delegate, Replacements, Switch, recorded
from megatron_taco.patching.boundary_wire import BACKWARD, FORWARD
from megatron_taco.patching.overlay import Overlay
from megatron_taco.patching.pipeline import PipelineHooks
from megatron_taco.patching.registry import Hit, Registry
from megatron_taco.telemetry.counters import Counters, Flow

_COMMUNICATE = "pipeline.communicate"
_UNDER_WAY = 64
"""Messages that are kept alive, more than a schedule has under way."""


@dataclass
class _Trained:
    """A model's chunks with their optimiser and schedule of the learning rate."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any


class PipelineArms:
    """The models, boundaries and communicators of all arms; one of them at a time is in force.

    Args:
        configs: Of each kind of boundary.
        counters: Count for all arms.

    Attributes:
        hooks: Of each kind of boundary.
    """

    def __init__(self, configs: Mapping[str, Config], counters: Counters) -> None:
        self.hooks = {
            name: PipelineHooks(config.compression.pipeline_parallel, counters)
            for name, config in configs.items()
        }
        claims: dict[str, Replacements] = {
            name: recorded(hooks.claim) for name, hooks in self.hooks.items()
        }
        claims[PLAIN] = {_COMMUNICATE: functools.partial(_plain, counters)}
        claims[SILENT] = {_COMMUNICATE: _Silent().communicate}
        self.sampling = False  # of errors, which is not for timed steps
        self._switch = Switch(claims)
        self._trained: dict[str, _Trained] = {}
        self._chunks: list[Any] = []

    def use(self, arm: str) -> None:
        """Put an arm and its model in force, as the training loop has set up the first one."""
        from megatron.core.utils import get_model_config

        self._switch.arm = arm
        trained = self._trained[arm]
        ours = vars(get_model_config(self._trained[PLAIN].chunks[0]))
        for chunk in trained.chunks:
            config = get_model_config(chunk)
            theirs = vars(config)
            theirs |= {name: value for name, value in ours.items() if theirs.get(name) is None}
            config.grad_scale_func = trained.optimizer.scale_loss
        self._chunks[:] = trained.chunks

    def chunks(self, arm: str) -> list[Any]:
        """Returns the chunks of an arm's model on this rank."""
        return self._trained[arm].chunks

    def model_built(self, model: Any) -> None:
        """Give a new ``GPTModel`` the boundaries of the arm that it is built for."""
        if self._switch.arm in self.hooks:
            self.hooks[self._switch.arm].model_built(model)

    def never_passed(self) -> list[int]:
        """Nothing is owed here either: arms take turns, and not all have run after two steps."""
        return []

    def finish(self) -> None:
        """Nothing is owed: at a learning rate of zero both ends keep what they began with."""

    def claim(self, registry: Registry) -> None:
        """Claim all targets but the model's construction."""
        registry.claim("startup.setup_model_and_optimizer", OWNER, self._setup)
        self._switch.claim(registry)

    def _setup(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            hit()
            for arm in (*self.hooks, PLAIN):
                self._switch.arm = arm
                self._trained[arm] = _Trained(*original(*args, **kwargs))
            plain = self._trained[SILENT] = self._trained[PLAIN]
            # The loop keeps this list and this optimiser; whose they are changes by turns.
            self._chunks = list(plain.chunks)
            optimizer = Delegate(lambda: self._trained[self._switch.arm].optimizer)
            return self._chunks, optimizer, plain.scheduler

        return setup_model_and_optimizer


def _plain(counters: Counters, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
    """The communicator's own messages, counted."""

    @functools.wraps(original)
    def _communicate(this: Any, **call: Any) -> Any:
        hit()
        for flow, name in ((FORWARD, "tensor_send_next"), (BACKWARD, "tensor_send_prev")):
            if (tensor := call[name]) is not None:
                size = tensor.numel() * tensor.element_size()
                count = counters[flow]
                count.seen += 1
                count.raw += size
                count.wire += size
                count.largest = max(count.largest, size)
        return original(this, **call)

    return _communicate


class _Silent:
    """A communicator whose messages have one element."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=_UNDER_WAY)
        self._received: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def communicate(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        """Wrap ``P2PCommunicator._communicate``."""

        @functools.wraps(original)
        def _communicate(this: Any, **call: Any) -> Any:
            hit()
            shapes = [call["tensor_shape"]] * 2
            if this.config.variable_seq_lengths:
                shapes = this._communicate_shapes(
                    call["tensor_send_next"],
                    call["tensor_send_prev"],
                    call["recv_prev"],
                    call["recv_next"],
                )
            overlay = Overlay(
                this,
                config=Overlay(this.config, variable_seq_lengths=True),
                _communicate_shapes=lambda *_: ((1,), (1,)),
            )
            tiny = {
                name: None if call[name] is None else call[name].detach().reshape(-1)[:1].clone()
                for name in ("tensor_send_next", "tensor_send_prev")
            }
            from_prev, from_next, requests = original(overlay, **(call | tiny))
            self._kept.append((tiny, from_prev, from_next))
            dtype: torch.dtype = this.config.pipeline_dtype
            return (
                None if from_prev is None else self._tensor(tuple(shapes[0]), dtype),
                None if from_next is None else self._tensor(tuple(shapes[1]), dtype),
                requests,
            )

        return _communicate

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor as it might have arrived; not zeros, with which a GPU computes faster."""
        key = shape, dtype
        if key not in self._received:
            device = torch.cuda.current_device()
            self._received[key] = torch.randn(shape, device=device).to(dtype)
        return self._received[key].clone().requires_grad_()


def flows() -> list[Flow]:
    """Returns all flows that the arms can count."""
    from megatron_taco.patching.pipeline import all_flows

    return all_flows()
