"""Every place of Transformer Engine that this package may replace, and what it relies on there.

Transformer Engine's linears do their tensor-parallel collectives themselves, by three functions
that its modules import by name; the registry rebinds those names.
"""

from __future__ import annotations

from megatron_taco.patching.target import TE_SUPPORTED, Target

_DISTRIBUTED = "transformer_engine.pytorch.distributed"
_BASE = "transformer_engine.pytorch.module.base"
_LINEAR = "transformer_engine.pytorch.module.linear"
_NORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"

TE_TARGETS: tuple[Target, ...] = (
    Target(
        name="tensor.te.all_reduce",
        module=_DISTRIBUTED,
        attribute="allreduce",
        versions=TE_SUPPORTED,
        parameters=("inp", "tp_group", "async_op"),
        axis="tensor",
        why="all-reduce of a row linear's partial sums and of a column linear's input gradient",
    ),
    Target(
        name="tensor.te.reduce_scatter",
        module=_DISTRIBUTED,
        attribute="reduce_scatter_along_first_dim",
        versions=TE_SUPPORTED,
        parameters=("inp", "tp_group", "async_op"),
        axis="tensor",
        why="the same under sequence parallelism",
    ),
    Target(
        name="tensor.te.all_gather",
        module=_DISTRIBUTED,
        attribute="gather_along_first_dim",
        versions=TE_SUPPORTED,
        parameters=("inp", "process_group", "async_op", "quantizer"),
        axis="tensor",
        why="sequence-parallel all-gather of a column linear's input, forward and re-gather",
    ),
    Target(
        name="tensor.te.gradient_gather",
        module=_BASE,
        attribute="TransformerEngineBaseModule.grad_output_preprocess",
        versions=TE_SUPPORTED,
        parameters=("ctx", "grad_output", "row_parallel_mode", "quantizer"),
        axis="tensor",
        why="tells the all-gather of a row linear's output gradient from the re-gather",
    ),
    Target(
        name="tensor.te.linear_function",
        module=_LINEAR,
        attribute="_Linear",
        versions=TE_SUPPORTED,
        also=(
            "_linear_forward_impl",
            "_linear_setup_ctx",
            "_linear_backward",
            "_linear_backward_impl",
            "_linear_eager",
        ),
        axis="tensor",
        why="tells forward from backward and the gather's role in a linear",
    ),
    Target(
        name="tensor.te.norm_linear_function",
        module=_NORM_LINEAR,
        attribute="_LayerNormLinear",
        versions=TE_SUPPORTED,
        axis="tensor",
        why="the same in a norm and linear in one",
    ),
    Target(
        name="tensor.te.linear_forward",
        module=_LINEAR,
        attribute="Linear.forward",
        versions=TE_SUPPORTED,
        parameters=("inp", "is_first_microbatch"),
        axis="tensor",
        why="names the layer a collective belongs to (linear)",
    ),
    Target(
        name="tensor.te.norm_linear_forward",
        module=_NORM_LINEAR,
        attribute="LayerNormLinear.forward",
        versions=TE_SUPPORTED,
        parameters=("inp", "is_first_microbatch"),
        axis="tensor",
        why="names the layer a collective belongs to (norm and linear)",
    ),
)
