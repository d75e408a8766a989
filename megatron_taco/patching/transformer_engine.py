"""The tensor-parallel seam inside Transformer Engine, whose linears do their own collectives.

Which role a collective has follows from Transformer Engine's source (``module/linear.py``,
``module/layernorm_linear.py``, ``module/base.py``):

===============================  ===================================  =============================
linear                           forward pass                         backward pass
===============================  ===================================  =============================
column-parallel                  gathers its input                    sums its input's gradient
                                                                      (all-reduce, or reduce-scatter
                                                                      under sequence parallelism),
                                                                      gathers its input once more
row-parallel                     sums its output (all-reduce or       gathers its output's gradient,
                                 reduce-scatter)                      in ``grad_output_preprocess``
===============================  ===================================  =============================

So within the autograd function of either linear a sum belongs to the pass that it runs in, and a
gather to the forward pass, unless it is issued by ``grad_output_preprocess``.  As in ``tensor.py``
the functions are subclassed to say so, and the modules' ``forward`` say which kind of layer it is.

Left to Transformer Engine: gathers with a quantizer or of a quantised tensor, which are compressed
already, and everything outside the tensor-parallel group or outside these two linears.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from megatron_taco.patching.errors import PatchError
from megatron_taco.patching.fingerprints import known
from megatron_taco.patching.inspection import inspect_all
from megatron_taco.patching.registry import Registry
from megatron_taco.patching.target import TE_SUPPORTED, TRANSFORMER_ENGINE
from megatron_taco.patching.te_targets import TE_TARGETS

if TYPE_CHECKING:
    from megatron_taco.patching.tensor import Hit, Roles, TensorParallelHooks

OWNER = "compression.tensor_parallel"

_FORWARD: Roles = {"all_gather": "forward", "all_reduce": "forward", "reduce_scatter": "forward"}
_BACKWARD: Roles = {"all_gather": "forward", "all_reduce": "backward", "reduce_scatter": "backward"}
_GRADIENT_GATHER: Roles = {"all_gather": "backward"}

Result = tuple[Any, Any]
"""What Transformer Engine's collectives return: a tensor, and a handle or None."""


class TransformerEngineHooks:
    """Claims every target in Transformer Engine for one router.

    Args:
        hooks: those in Megatron, which embedding and output layer go through in any case.
    """

    def __init__(self, hooks: TensorParallelHooks) -> None:
        self._hooks = hooks

    def _role(self, collective: str, inp: Any, group: Any) -> str | None:
        """The role of a collective of a plain tensor over our group, or None for any other."""
        if type(inp) not in (torch.Tensor, torch.nn.Parameter):
            return None
        role = self._hooks.scope.role(collective)
        return role if role is not None and self._hooks.ours(inp, group) else None

    def _all_reduce(self, original: Callable[..., Result], hit: Hit) -> Callable[..., Result]:
        @functools.wraps(original)
        def allreduce(inp: Any, tp_group: Any = None, async_op: bool = False) -> Result:
            role = self._role("all_reduce", inp, tp_group)
            if role is None:
                return original(inp, tp_group, async_op)
            hit()

            def plain() -> Any:
                return original(inp, tp_group, async_op)[1]

            return inp, self._hooks.router.all_reduce(role, inp, tp_group, async_op, plain)

        return allreduce

    def _reduce_scatter(self, original: Callable[..., Result], hit: Hit) -> Callable[..., Result]:
        @functools.wraps(original)
        def reduce_scatter_along_first_dim(
            inp: Any, tp_group: Any, async_op: bool = False, **more: Any
        ) -> Result:
            role = None if more else self._role("reduce_scatter", inp, tp_group)
            if role is None or inp.size(0) % tp_group.size():  # the original refuses an odd size
                return original(inp, tp_group, async_op, **more)
            hit()
            output = inp.new_empty((inp.size(0) // tp_group.size(), *inp.shape[1:]))
            uncompressed: list[Result] = []

            def plain() -> None:
                uncompressed.append(original(inp, tp_group, async_op))

            handle = self._hooks.router.reduce_scatter(
                role, output, inp.contiguous(), tp_group, async_op, plain
            )
            return uncompressed[0] if uncompressed else (output, handle)

        return reduce_scatter_along_first_dim

    def _all_gather(self, original: Callable[..., Result], hit: Hit) -> Callable[..., Result]:
        @functools.wraps(original)
        def gather_along_first_dim(
            inp: Any,
            process_group: Any,
            async_op: bool = False,
            quantizer: Any = None,
            **more: Any,
        ) -> Result:
            role = None
            if quantizer is None and not more:
                role = self._role("all_gather", inp, process_group)
            if role is None:
                return original(inp, process_group, async_op, quantizer, **more)
            hit()
            output = inp.new_empty((inp.size(0) * process_group.size(), *inp.shape[1:]))
            uncompressed: list[Result] = []

            def plain() -> None:
                uncompressed.append(original(inp, process_group, async_op))

            handle = self._hooks.router.all_gather(
                role, output, inp.contiguous(), process_group, async_op, plain
            )
            return uncompressed[0] if uncompressed else (output, handle)

        return gather_along_first_dim

    def _gradient_gather(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        scope = self._hooks.scope

        @functools.wraps(original)
        def grad_output_preprocess(*args: Any, **kwargs: Any) -> Any:
            hit()
            with scope.function(scope.kind, _GRADIENT_GATHER):
                return original(*args, **kwargs)

        return grad_output_preprocess

    def claim(self, registry: Registry) -> None:
        """Claim all targets; nothing is replaced until the registry is applied."""
        function = self._hooks.function((_FORWARD, _BACKWARD))
        replacements: dict[str, Callable[[Any, Hit], Any]] = {
            "tensor.te.all_reduce": self._all_reduce,
            "tensor.te.reduce_scatter": self._reduce_scatter,
            "tensor.te.all_gather": self._all_gather,
            "tensor.te.gradient_gather": self._gradient_gather,
            "tensor.te.linear_function": function,
            "tensor.te.norm_linear_function": function,
            "tensor.te.linear_forward": self._hooks.module("linear"),
            "tensor.te.norm_linear_forward": self._hooks.module("linear"),
        }
        for target in TE_TARGETS:
            registry.claim(target, OWNER, replacements[target.name])


def quantised_gathers(arguments: Any) -> bool:
    """Whether Transformer Engine gathers FP8 or FP4 between hidden layers by itself.

    Args:
        arguments: Megatron's arguments, or a model's configuration.
    """
    return any(getattr(arguments, name, None) for name in ("fp8", "fp4"))


def check_model(model: torch.nn.Module, *, hooked: bool) -> None:
    """Refuse a model that sums over tensor-parallel ranks where no hook is.

    Args:
        model: a stage as built.
        hooked: whether Transformer Engine's linears are hooked.

    Raises:
        PatchError: naming the first such module and what to change.
    """
    for name, module in _parallel_te_modules(model):
        kind = type(module).__name__
        buffers = [key for key, value in vars(module).items() if key[:3] == "ub_" and value is True]
        if buffers:
            raise PatchError(
                f"{name} ({kind}): {', '.join(buffers)}: Transformer Engine's user-buffers do "
                "collectives inside the GEMM, where nothing can be compressed; leave "
                "tp_comm_overlap out, or compression off"
            )
        if getattr(module, "symmetric_ar_type", None) is not None:
            raise PatchError(
                f"{name} ({kind}): symmetric_ar_type {module.symmetric_ar_type}: an all-reduce in "
                "symmetric memory is not hooked; leave symmetric_ar_type out, or compression off"
            )
        if not hooked or not _is_a(module, _HOOKED):
            raise PatchError(
                f"{name} ({kind}): this layer of Transformer Engine does its tensor-parallel "
                f"collectives where no hook of ours is; {_change(hooked)}, or compression off"
            )


def _change(hooked: bool) -> str:
    if hooked:
        return "use its Linear or LayerNormLinear"
    unknown = [
        finding.detail
        for finding in inspect_all(TE_TARGETS, known(TRANSFORMER_ENGINE), TRANSFORMER_ENGINE)
        if finding.status != "ok"
    ]
    if unknown:
        return f"{unknown[0]}; install transformer-engine{TE_SUPPORTED}"
    return f"give --transformer-impl {TRANSFORMER_ENGINE}"


_HOOKED = frozenset({"Linear", "LayerNormLinear"})
_COMMUNICATE = _HOOKED | {"LayerNormMLP", "BasicLinear"}


def _is_a(module: torch.nn.Module, names: frozenset[str]) -> bool:
    """Whether a module is of one of these classes of Transformer Engine."""
    return any(
        cls.__name__ in names and cls.__module__.startswith("transformer_engine.")
        for cls in type(module).__mro__
    )


def _parallel_te_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules of Transformer Engine that communicate over tensor-parallel ranks, with names."""
    for name, module in model.named_modules():
        if not _is_a(module, _COMMUNICATE):
            continue
        size = getattr(module, "tp_size", getattr(module, "tensor_parallel_size", 1))
        modes = ("parallel_mode", "tensor_parallel_mode", "set_parallel_mode")
        if size > 1 and any(getattr(module, mode, None) for mode in modes):
            yield name, module
