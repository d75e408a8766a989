"""The places of Megatron-LM that the data-parallel seam replaces; see ``data.py``."""

from __future__ import annotations

from megatron_taco.patching.target import SUPPORTED, Target

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_GROUP = "_ParamAndGradBucketGroup"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_GRADIENTS = (f"{_GROUP}.start_grad_sync", f"{_GROUP}.finish_grad_sync")
_WEIGHTS = (f"{_GROUP}.start_param_sync", f"{_GROUP}.finish_param_sync")


DATA_TARGETS: tuple[Target, ...] = (
    Target(
        name="data.start_grad_sync",
        module=_BUFFER,
        attribute=f"{_GROUP}.start_grad_sync",
        versions=SUPPORTED,
        depends_on=(*_GRADIENTS, "_ParamAndGradBucket.__init__"),
        parameters=("force_all_reduce",),
        axis="data",
        why="tells which bucket group reduces its gradients now",
    ),
    Target(
        name="data.start_param_sync",
        module=_BUFFER,
        attribute=f"{_GROUP}.start_param_sync",
        versions=SUPPORTED,
        depends_on=_WEIGHTS,
        parameters=("force_sync",),
        axis="data",
        why="tells which bucket group gathers its weights now",
    ),
    Target(
        name="data.coalescing_manager",
        module=_BUFFER,
        attribute="_coalescing_manager",
        versions=SUPPORTED,
        depends_on=(f"{_GROUP}.start_grad_sync", f"{_GROUP}.start_param_sync"),
        parameters=("group", "device", "async_ops"),
        axis="data",
        why="torch's would put compressed messages off until after they had been decoded",
    ),
    Target(
        name="data.reduce_scatter",
        module=_BUFFER,
        attribute="dist_reduce_scatter_func",
        versions=SUPPORTED,
        depends_on=(f"{_GROUP}.start_grad_sync",),
        parameters=("output", "input", "op", "group", "async_op"),
        axis="data",
        why="reduce-scatter of a bucket's gradients (distributed optimiser)",
    ),
    Target(
        name="data.all_gather",
        module=_BUFFER,
        attribute="dist_all_gather_func",
        versions=SUPPORTED,
        depends_on=(f"{_GROUP}.start_param_sync",),
        parameters=("output_tensor", "input_tensor", "group", "async_op"),
        axis="data",
        why="all-gather of a bucket's weights (distributed optimiser)",
    ),
    Target(
        name="data.torch",
        module=_BUFFER,
        attribute="torch",
        versions=SUPPORTED,
        depends_on=(f"{_GROUP}.start_grad_sync",),
        axis="data",
        why="all-reduce of a bucket's gradients (torch.distributed.all_reduce)",
    ),
    Target(
        name="data.copy_main_params",
        module=_OPTIMIZER,
        attribute="DistributedOptimizer._copy_main_params_to_model_params",
        versions=SUPPORTED,
        depends_on=(
            "DistributedOptimizer._copy_main_params_to_model_params",
            "DistributedOptimizer._build_model_and_main_param_groups",
            "DistributedOptimizer._get_model_param_range_map",
            "DistributedOptimizer.step_with_ready_grads",
        ),
        axis="data",
        why="keeps the difference between new weights and those that all ranks hold",
    ),
    Target(
        name="data.ddp_init",
        module="megatron.core.distributed.distributed_data_parallel",
        attribute="DistributedDataParallel.__init__",
        versions=SUPPORTED,
        parameters=("config", "ddp_config", "module"),
        axis="data",
        why="tells the kind of each parameter in a bucket",
    ),
    Target(
        name="data.generate_state_dict",
        module="megatron.training.checkpointing",
        attribute="generate_state_dict",
        versions=SUPPORTED,
        depends_on=("generate_state_dict", "save_checkpoint"),
        parameters=("args", "model", "optimizer", "iteration"),
        axis="data",
        why="the memory of gradient methods goes into checkpoints",
    ),
)
