"""Every place of Megatron-LM that this package may replace, and what it relies on there.

A target is an attribute which Megatron looks up at call time: a module global or a class
attribute. Upstream bodies are never copied; our replacements wrap what they find. What a wrapper
takes for granted about its surroundings (who calls the attribute, with which tensors) is named in
`depends_on`, whose source is fingerprinted (`fingerprints.py`), so that a Megatron that moved is
refused before anything changes.
"""

from __future__ import annotations

from megatron_taco.patching.data_targets import DATA_TARGETS
from megatron_taco.patching.target import SUPPORTED, Axis, Target

__all__ = ["SUPPORTED", "TARGETS", "Axis", "Target", "get"]

_LAYERS = "megatron.core.tensor_parallel.layers"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_COLLECTIVE = ("output_tensor", "input_tensor", "group", "async_op")
_SCATTER = ("output", "input", "group", "async_op")


TARGETS: tuple[Target, ...] = (
    Target(
        name="tensor.layers.all_gather",
        module=_LAYERS,
        attribute="dist_all_gather_func",
        versions=SUPPORTED,
        depends_on=(f"{_LINEAR}.forward", f"{_LINEAR}.backward"),
        parameters=_COLLECTIVE,
        axis="tensor",
        why="sequence-parallel all-gather of a column linear's input, forward and re-gather",
    ),
    Target(
        name="tensor.layers.reduce_scatter",
        module=_LAYERS,
        attribute="dist_reduce_scatter_func",
        versions=SUPPORTED,
        depends_on=(f"{_LINEAR}.backward",),
        parameters=_SCATTER,
        axis="tensor",
        why="sequence-parallel reduce-scatter of a column linear's input gradient",
    ),
    Target(
        name="tensor.layers.torch",
        module=_LAYERS,
        attribute="torch",
        versions=SUPPORTED,
        depends_on=(
            f"{_LINEAR}.forward",
            f"{_LINEAR}.backward",
            "LinearWithFrozenWeight.backward",
        ),
        axis="tensor",
        why="a linear's all-reduce of its input gradient, and its product where that is chunked",
    ),
    Target(
        name="tensor.mappings.all_gather",
        module=_MAPPINGS,
        attribute="dist_all_gather_func",
        versions=SUPPORTED,
        depends_on=("_gather_along_first_dim", "_gather_along_last_dim"),
        parameters=_COLLECTIVE,
        axis="tensor",
        why="all-gather of activations and of their gradients between tensor-parallel regions",
    ),
    Target(
        name="tensor.mappings.reduce_scatter",
        module=_MAPPINGS,
        attribute="dist_reduce_scatter_func",
        versions=SUPPORTED,
        depends_on=("_reduce_scatter_along_first_dim", "_reduce_scatter_along_last_dim"),
        parameters=_SCATTER,
        axis="tensor",
        why="sequence-parallel reduce-scatter of a row linear's partial sums",
    ),
    Target(
        name="tensor.mappings.torch",
        module=_MAPPINGS,
        attribute="torch",
        versions=SUPPORTED,
        depends_on=("_reduce",),
        axis="tensor",
        why="all-reduce of a row linear's partial sums (torch.distributed.all_reduce)",
    ),
    Target(
        name="tensor.linear_function",
        module=_LAYERS,
        attribute=_LINEAR,
        versions=SUPPORTED,
        depends_on=(_LINEAR, "linear_with_grad_accumulation_and_async_allreduce"),
        axis="tensor",
        why="tells forward from backward and the gather's role in the column linear",
    ),
    Target(
        name="tensor.linear_frozen_function",
        module=_LAYERS,
        attribute="LinearWithFrozenWeight",
        versions=SUPPORTED,
        depends_on=("LinearWithFrozenWeight", "linear_with_frozen_weight"),
        axis="tensor",
        why="tells forward from backward in a linear whose weight is frozen",
    ),
    Target(
        name="tensor.reduce_function",
        module=_MAPPINGS,
        attribute="_ReduceFromModelParallelRegion",
        versions=SUPPORTED,
        depends_on=(
            "_ReduceFromModelParallelRegion",
            "reduce_from_tensor_model_parallel_region",
        ),
        axis="tensor",
        why="tells the row linear's all-reduce from others",
    ),
    Target(
        name="tensor.reduce_scatter_function",
        module=_MAPPINGS,
        attribute="_ReduceScatterToSequenceParallelRegion",
        versions=SUPPORTED,
        depends_on=(
            "_ReduceScatterToSequenceParallelRegion",
            "reduce_scatter_to_sequence_parallel_region",
        ),
        axis="tensor",
        why="tells the row linear's reduce-scatter and its backward all-gather from others",
    ),
    Target(
        name="tensor.copy_function",
        module=_MAPPINGS,
        attribute="_CopyToModelParallelRegion",
        versions=SUPPORTED,
        depends_on=("_CopyToModelParallelRegion", "copy_to_tensor_model_parallel_region"),
        axis="tensor",
        why="tells the all-reduce of a copied input's gradient from others",
    ),
    Target(
        name="tensor.gather_function",
        module=_MAPPINGS,
        attribute="_GatherFromSequenceParallelRegion",
        versions=SUPPORTED,
        depends_on=(
            "_GatherFromSequenceParallelRegion",
            "gather_from_sequence_parallel_region",
        ),
        axis="tensor",
        why="tells the all-gather of a linear with a frozen weight from others",
    ),
    Target(
        name="tensor.scatter_function",
        module=_MAPPINGS,
        attribute="_ScatterToSequenceParallelRegion",
        versions=SUPPORTED,
        depends_on=(
            "_ScatterToSequenceParallelRegion",
            "scatter_to_sequence_parallel_region",
        ),
        axis="tensor",
        why="tells the all-gather of the embedding's gradient from others",
    ),
    Target(
        name="tensor.column_forward",
        module=_LAYERS,
        attribute="ColumnParallelLinear.forward",
        versions=SUPPORTED,
        depends_on=("ColumnParallelLinear.forward", "ColumnParallelLinear._forward_impl"),
        parameters=("input_", "weight", "runtime_gather_output"),
        axis="tensor",
        why="names the layer a collective belongs to (column-parallel linear)",
    ),
    Target(
        name="tensor.row_forward",
        module=_LAYERS,
        attribute="RowParallelLinear.forward",
        versions=SUPPORTED,
        depends_on=("RowParallelLinear.forward", "RowParallelLinear._forward_impl"),
        parameters=("input_",),
        axis="tensor",
        why="names the layer a collective belongs to (row-parallel linear)",
    ),
    Target(
        name="tensor.embedding_forward",
        module="megatron.core.models.common.embeddings.language_model_embedding",
        attribute="LanguageModelEmbedding.forward",
        versions=SUPPORTED,
        parameters=("input_ids", "position_ids"),
        axis="tensor",
        why="gives the embedding's traffic a role of its own",
    ),
    Target(
        name="tensor.gpt_init",
        module="megatron.core.models.gpt.gpt_model",
        attribute="GPTModel.__init__",
        versions=SUPPORTED,
        parameters=("config", "pre_process", "post_process"),
        axis="tensor",
        why="names the model's linears once it is built, the output layer among them",
    ),
    Target(
        name="pipeline.communicate",
        module="megatron.core.pipeline_parallel.p2p_communication",
        attribute="P2PCommunicator._communicate",
        versions=SUPPORTED,
        depends_on=(
            "P2PCommunicator._communicate",
            "P2PCommunicator._communicate_shapes",
            "_batched_p2p_ops",
            "_p2p_ops",
        ),
        parameters=(
            "tensor_send_next",
            "tensor_send_prev",
            "recv_prev",
            "recv_next",
            "tensor_shape",
            "wait_on_reqs",
        ),
        axis="pipeline",
        why="sends what boundaries encode between stages instead of activations",
    ),
    Target(
        name="pipeline.checkpoint",
        module="megatron.core.tensor_parallel.random",
        attribute="checkpoint",
        versions=SUPPORTED,
        depends_on=("checkpoint", "CheckpointFunction"),
        parameters=("function", "distribute_saved_activations"),
        axis="pipeline",
        why="gives recomputed layers the token ids of their micro-batch",
    ),
    Target(
        name="pipeline.finalize_model_grads",
        module="megatron.core.distributed.finalize_model_grads",
        attribute="finalize_model_grads",
        versions=SUPPORTED,
        parameters=("model", "num_tokens", "pg_collection"),
        axis="pipeline",
        why="reduces the projectors' gradients and exchanges them between both ends",
    ),
    Target(
        name="pipeline.get_megatron_optimizer",
        module="megatron.core.optimizer",
        attribute="get_megatron_optimizer",
        versions=SUPPORTED,
        parameters=("config", "model_chunks"),
        axis="pipeline",
        why="adds the boundaries' optimiser to the chain",
    ),
    Target(
        name="telemetry.training_log",
        module="megatron.training.training",
        attribute="training_log",
        versions=SUPPORTED,
        parameters=(
            "loss_dict",
            "learning_rate",
            "iteration",
            "loss_scale",
            "skipped_iter",
            "grad_norm",
        ),
        axis="telemetry",
        why="writes a line of metrics whenever Megatron logs a step",
    ),
    Target(
        name="telemetry.train_step",
        module="megatron.training.training",
        attribute="train_step",
        versions=SUPPORTED,
        parameters=("forward_step_func", "data_iterator", "model", "optimizer", "iteration"),
        axis="telemetry",
        why="marks where a training step begins and ends",
    ),
    Target(
        name="telemetry.evaluate",
        module="megatron.training.training",
        attribute="evaluate",
        versions=SUPPORTED,
        parameters=("forward_step_func", "data_iterator", "model"),
        axis="telemetry",
        why="records the loss on a held-out set",
    ),
    Target(
        name="telemetry.evaluate_and_print_results",
        module="megatron.training.training",
        attribute="evaluate_and_print_results",
        versions=SUPPORTED,
        parameters=("prefix", "iteration"),
        axis="telemetry",
        why="tells which held-out set is evaluated, and after which step",
    ),
    Target(
        name="startup.setup_model_and_optimizer",
        module="megatron.training.training",
        attribute="setup_model_and_optimizer",
        versions=SUPPORTED,
        parameters=("model_type", "checkpointing_context"),
        axis="startup",
        why="where compression starts in a script of yours: arguments known, no model built yet",
    ),
    Target(
        name="startup.pretrain",
        module="megatron.training.training",
        attribute="pretrain",
        versions=SUPPORTED,
        parameters=("forward_step_func", "store"),
        axis="startup",
        why="where the figures of a script of yours are summed up: training is done",
    ),
    Target(
        name="startup.distributed_optimizer_state",
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer.state_dict",
        versions=SUPPORTED,
        axis="startup",
        why="without Apex and TE Megatron asserts while it loads a distributed optimiser",
    ),
    Target(
        name="startup.distributed_optimizer_steps",
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer.load_state_dict",
        versions=SUPPORTED,
        axis="startup",
        why="without Apex and TE the step of Adam is lost while loading",
    ),
    Target(
        name="startup.compile_helpers",
        module="megatron.core.datasets.utils",
        attribute="compile_helpers",
        versions=SUPPORTED,
        axis="startup",
        why="the wheel has helpers_cpp prebuilt and no Makefile, and Megatron would exit",
    ),
    *DATA_TARGETS,
)

_BY_NAME = {target.name: target for target in TARGETS}


def get(name: str) -> Target:
    """Return the target of that name.

    Raises:
        KeyError: No such target; the message lists those that exist.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise KeyError(f"no target is named {name!r}; targets: {', '.join(_BY_NAME)}") from None
