"""The tensor-parallel seam: Megatron's own collectives of activations and their gradients.

Three kinds of hook work together (line numbers do not matter, names do):

* the ``forward`` of ``ColumnParallelLinear``, ``RowParallelLinear``, ``LanguageModelEmbedding`` and
  the construction of ``GPTModel`` tell which kind of module is running;
* the autograd functions of ``layers`` and ``mappings`` are subclassed so that this kind reaches the
  backward pass and each collective gets its role;
* the collectives that those functions look up as globals of their modules
  (``dist_all_gather_func``, ``dist_reduce_scatter_func``, ``torch.distributed.all_reduce``) are
  routed.

No upstream body is copied.  A collective whose role is unknown, whose group is not the
tensor-parallel group, whose operation is not a sum or whose tensor is not floating point goes to
the original untouched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_taco.collectives.router import Router
from megatron_taco.patching.overlap import ForwardOverlap
from megatron_taco.patching.overlay import Overlay
from megatron_taco.patching.registry import Registry
from megatron_taco.patching.scope import BACKWARD, FORWARD, Kind, Pass, Scope
from megatron_taco.telemetry.counters import Flow

OWNER = "compression.tensor_parallel"
_KIND = "_megatron_taco_kind"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Hit = Callable[[], None]
Roles = Mapping[str, Pass]

_NO_ROLES: Roles = {}
# For each autograd function: the collectives of its forward and of its backward pass, each with the
# pass that the tensor belongs to.
_LINEAR: tuple[Roles, Roles] = (
    {"all_gather": "forward"},
    {"all_gather": "forward", "all_reduce": "backward", "reduce_scatter": "backward"},
)
_FUNCTIONS: dict[str, tuple[Roles, Roles]] = {
    "tensor.linear_function": _LINEAR,
    "tensor.linear_frozen_function": (_NO_ROLES, {"all_reduce": "backward"}),
    "tensor.reduce_function": ({"all_reduce": "forward"}, _NO_ROLES),
    "tensor.reduce_scatter_function": ({"reduce_scatter": "forward"}, {"all_gather": "backward"}),
    "tensor.copy_function": (_NO_ROLES, {"all_reduce": "backward"}),
    "tensor.gather_function": ({"all_gather": "forward"}, {"reduce_scatter": "backward"}),
    "tensor.scatter_function": (_NO_ROLES, {"all_gather": "backward"}),
}


def expected_flows(
    *,
    sequence_parallel: bool,
    learned_positions: bool,
    router: Router,
    quantised_gathers: bool = False,
) -> list[Flow]:
    """The flows that must happen in a training step of a GPT with tensor parallelism.

    Only flows of roles that are on are named; see contract 7 of the design.

    Args:
        sequence_parallel: whether activations are split over the sequence.
        learned_positions: whether positions are embedded, which under sequence parallelism
            turns the embedding's reduce-scatter into an all-reduce and a split.
        router: knows the roles that are on.
        quantised_gathers: whether Transformer Engine gathers FP8 or FP4 between hidden layers by
            itself.
    """
    collectives: dict[str, tuple[str, ...]]
    if sequence_parallel:
        collectives = {
            "tp.forward": ("all_gather", "reduce_scatter"),
            "tp.backward": ("all_gather", "reduce_scatter"),
            "tp.output_layer": ("all_gather", "reduce_scatter"),
            "tp.embedding": (
                "all_gather",
                "all_reduce" if learned_positions else "reduce_scatter",
            ),
        }
    else:
        collectives = {
            "tp.forward": ("all_reduce",),
            "tp.backward": ("all_reduce",),
            "tp.output_layer": ("all_reduce",),
            "tp.embedding": ("all_reduce",),
        }
    return [
        Flow(role, collective)
        for role, names in collectives.items()
        if role in router.roles
        for collective in names
        if not (quantised_gathers and collective == "all_gather" and role in (FORWARD, BACKWARD))
    ]


def all_flows() -> list[Flow]:
    """Every flow this seam can count, in report order."""
    roles = ("tp.forward", "tp.backward", "tp.embedding", "tp.output_layer")
    return [Flow(r, c) for r in roles for c in ("all_reduce", "reduce_scatter", "all_gather")]


class TensorParallelHooks:
    """Claims every target of the tensor-parallel seam for one router.

    Args:
        router: sends the collectives.
        forward_chunks: chunks in which a linear's product is made and sent; 1 leaves it whole.
    """

    def __init__(self, router: Router, forward_chunks: int = 1) -> None:
        self.router = router
        self.scope = Scope()
        self._group: dist.ProcessGroup | None = None
        self._overlap: ForwardOverlap | None = None
        if forward_chunks > 1:
            self._overlap = ForwardOverlap(router, self.scope, forward_chunks, self.ours)

    def ours(self, tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> bool:
        """Whether this is a sum or gather of activations over the tensor-parallel group."""
        if self._group is None:
            from megatron.core import parallel_state

            self._group = parallel_state.get_tensor_model_parallel_group()
        return (
            group is self._group
            and op == dist.ReduceOp.SUM
            and tensor.dtype in _DTYPES
            and tensor.dim() >= 2
        )

    def _all_reduce(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(
            tensor: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            def plain() -> Any:
                return original(tensor, op=op, group=group, async_op=async_op)

            role = self.scope.role("all_reduce")
            if role is None or not self.ours(tensor, group, op):
                return plain()
            hit()
            if self._overlap is not None and self._overlap.finish_all_reduce(tensor):
                return None
            return self.router.all_reduce(role, tensor, group, async_op, plain)

        return all_reduce

    def _torch(self, original: Any, hit: Hit) -> Any:
        """A ``torch`` whose ``distributed.all_reduce`` is routed; all else is the original's.

        With forward overlap its ``matmul`` is ours as well.
        """
        distributed = original.distributed
        routed = self._all_reduce(lambda *a, **k: distributed.all_reduce(*a, **k), hit)
        names: dict[str, Any] = {"distributed": Overlay(distributed, all_reduce=routed)}
        if self._overlap is not None:
            names["matmul"] = self._overlap.matmul(original.matmul)
        return Overlay(original, **names)

    def _all_gather(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_gather_into_tensor(
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            def plain() -> Any:
                return original(output_tensor, input_tensor, group=group, async_op=async_op)

            role = self.scope.role("all_gather")
            if role is None or not self.ours(input_tensor, group):
                return plain()
            hit()
            overlap = None if async_op else self._overlap
            if overlap is not None and overlap.begin_all_gather(output_tensor, input_tensor, group):
                return None
            return self.router.all_gather(role, output_tensor, input_tensor, group, async_op, plain)

        return all_gather_into_tensor

    def _reduce_scatter(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def reduce_scatter_tensor(
            output: torch.Tensor,
            input: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            def plain() -> Any:
                return original(output, input, op=op, group=group, async_op=async_op)

            role = self.scope.role("reduce_scatter")
            if role is None or not self.ours(input, group, op):
                return plain()
            hit()
            if self._overlap is not None and self._overlap.finish_reduce_scatter(output, input):
                return None
            return self.router.reduce_scatter(role, output, input, group, async_op, plain)

        return reduce_scatter_tensor

    def function(
        self, roles: tuple[Roles, Roles]
    ) -> Callable[[type[torch.autograd.Function], Hit], type[torch.autograd.Function]]:
        """Subclass an autograd function so that its collectives know their roles."""
        scope = self.scope
        forward_roles, backward_roles = roles

        def subclass(base: Any, hit: Hit) -> Any:
            def forward(ctx: Any, *args: Any) -> Any:
                hit()
                if ctx is not None:  # Transformer Engine passes none where no gradient is needed
                    setattr(ctx, _KIND, scope.kind)
                with scope.function(scope.kind, forward_roles):
                    return base.forward(ctx, *args)

            def backward(ctx: Any, *grads: Any) -> Any:
                with scope.function(getattr(ctx, _KIND), backward_roles):
                    return base.backward(ctx, *grads)

            return type(
                base.__name__,
                (base,),
                {
                    "__module__": base.__module__,
                    "__doc__": base.__doc__,
                    "forward": staticmethod(forward),
                    "backward": staticmethod(backward),
                },
            )

        return subclass

    def module(
        self,
        kind: Kind,
        overlapped: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None,
    ) -> Callable[[Callable[..., Any], Hit], Callable[..., Any]]:
        """Wrap a module's ``forward`` so that the kind of module is known while it runs.

        Args:
            kind: the kind, where the module was not given another.
            overlapped: the context, given the module, in which it runs overlapped.
        """
        scope = self.scope

        def wrap(original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
            @functools.wraps(original)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                hit()
                with scope.module(getattr(self, _KIND, kind)):
                    if overlapped is None:
                        return original(self, *args, **kwargs)
                    with overlapped(self):
                        return original(self, *args, **kwargs)

            return forward

        return wrap

    @staticmethod
    def model_built(model: Any) -> None:
        """Name the output layer of a new ``GPTModel``; a listener of ``ModelInit``."""
        output_layer = getattr(model, "output_layer", None)
        if output_layer is not None:
            setattr(output_layer, _KIND, "output_layer")

    def claim(self, registry: Registry) -> None:
        """Claim all targets; nothing is replaced until the registry is applied."""
        overlap = self._overlap
        claims: dict[str, Callable[[Any, Hit], Any]] = {
            "tensor.layers.all_gather": self._all_gather,
            "tensor.layers.reduce_scatter": self._reduce_scatter,
            "tensor.layers.torch": self._torch,
            "tensor.mappings.all_gather": self._all_gather,
            "tensor.mappings.reduce_scatter": self._reduce_scatter,
            "tensor.mappings.torch": self._torch,
            "tensor.column_forward": self.module("linear", overlap.column if overlap else None),
            "tensor.row_forward": self.module("linear", overlap.row if overlap else None),
            "tensor.embedding_forward": self.module("embedding"),
        }
        for name, roles in _FUNCTIONS.items():
            claims[name] = self.function(roles)
        for name, replacement in claims.items():
            registry.claim(name, OWNER, replacement)
