"""A training script as a user of Megatron has one: it knows nothing of this package.

It has the structure of Megatron-LM's pretrain_gpt.py (providers, then ``pretrain`` under the main
guard, with functions imported by value) and runs on megatron-core 0.18 and 0.19.
"""

from dataclasses import dataclass

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from tests.distributed.plain_megatron import datasets, forward_step


@dataclass
class Note:
    """Saved with the arguments in every checkpoint: pickle has to find this class."""

    text: str


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, **_):  # type: ignore[no-untyped-def]
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def main() -> None:
    args = parse_and_validate_args()
    args.note = Note("kept")
    torch.serialization.add_safe_globals([Note])  # as torch asks whoever loads it, with 0.18
    parts = [ModelType.encoder_or_decoder, forward_step]
    try:
        from megatron.training.argument_utils import gpt_config_from_args

        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    except ImportError:
        config = pretrain_cfg_container_from_args(args)
        parts.insert(0, model_provider)
    pretrain(config, datasets, *parts)


if __name__ == "__main__":
    main()
