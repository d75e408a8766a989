"""What compression has to know about a training that somebody else set up."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_taco.patching.conflicts import TE_IMPL
from megatron_taco.patching.fingerprints import known
from megatron_taco.patching.inspection import inspect_all
from megatron_taco.patching.target import TRANSFORMER_ENGINE
from megatron_taco.patching.te_targets import TE_TARGETS

_FROM_MODEL_CONFIG = (
    "tensor_model_parallel_size",
    "tp_comm_overlap",
    "symmetric_ar_type",
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "use_transformer_engine_op_fuser",
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of one training.

    Attributes:
        arguments: Megatron's arguments by name, as far as there are any, to find what does not go
            with compression.
        sequence_parallel: whether activations are split over the sequence.
        learned_positions: whether positions are embedded.
        distributed_optimizer: whether gradients are reduce-scattered and weights gathered.
        seed: of the run.
        log_interval: steps between two reports.
        save: folder of the checkpoints, or None.
        resumes: whether a checkpoint is there to go on from.
        megatron_training: whether the loop uses ``megatron.training`` and its arguments.
        transformer_engine: whether layers may be Transformer Engine's.
        quantised_gathers: whether Transformer Engine gathers FP8 or FP4 between them.
    """

    arguments: Mapping[str, Any]
    sequence_parallel: bool
    learned_positions: bool
    distributed_optimizer: bool
    seed: int
    log_interval: int
    save: Path | None
    resumes: bool
    megatron_training: bool
    transformer_engine: bool
    quantised_gathers: bool


def facts_of_megatron() -> Facts:
    """What Megatron's validated arguments say; for scripts that use ``megatron.training``."""
    from megatron.training import get_args

    from megatron_taco.patching.transformer_engine import quantised_gathers

    args = get_args()
    return Facts(
        arguments=vars(args),
        sequence_parallel=args.sequence_parallel,
        learned_positions=args.position_embedding_type == "learned_absolute",
        distributed_optimizer=args.use_distributed_optimizer,
        seed=args.seed,
        log_interval=args.log_interval,
        save=Path(args.save) if args.save else None,
        resumes=bool(args.load) and _has_checkpoint(Path(args.load)),
        megatron_training=True,
        transformer_engine=args.transformer_impl == TE_IMPL,
        quantised_gathers=quantised_gathers(args),
    )


def facts_of_model(model_config: Any, position_embedding_type: str, save: Path | None) -> Facts:
    """What a model's own configuration says; for loops that use ``megatron.core`` alone.

    Args:
        model_config: Megatron's ``TransformerConfig``.
        position_embedding_type: as it is given to ``GPTModel``.
        save: folder of the checkpoints, or None.
    """
    from megatron_taco.patching.transformer_engine import quantised_gathers

    return Facts(
        arguments={name: getattr(model_config, name, None) for name in _FROM_MODEL_CONFIG},
        sequence_parallel=model_config.sequence_parallel,
        learned_positions=position_embedding_type == "learned_absolute",
        distributed_optimizer=False,
        seed=0,  # keys the random rounding of the data-parallel axis, which such a loop has not
        log_interval=1,
        save=save,
        resumes=save is not None and _has_checkpoint(save),
        megatron_training=False,
        transformer_engine=_has_known_te(),
        quantised_gathers=quantised_gathers(model_config),
    )


def default_run_dir(facts: Facts) -> Path:
    """Where figures go if nobody says it: with the checkpoints, else by the script's name."""
    if facts.save is not None:
        return facts.save / "megatron_taco"
    return Path("megatron_taco_runs") / (Path(sys.argv[0]).stem or "run")


def _has_known_te() -> bool:
    """Whether Transformer Engine is loaded, which Megatron does if it can, and is one we know.

    A model's configuration does not say whose layers it is for; one that we do not know is refused
    once a model has such layers.
    """
    if "transformer_engine.pytorch" not in sys.modules:
        return False
    package = TRANSFORMER_ENGINE
    findings = inspect_all(TE_TARGETS, known(package), package)
    return all(finding.status == "ok" for finding in findings)


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "latest_checkpointed_iteration.txt").is_file()
