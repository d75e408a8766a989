"""Megatron's own training without anything of ours but the repairs that it needs to start.

The comparison for contract 6: the CPU shim and the skipped build of the data helpers are start-up
repairs; model, data, loop, optimiser and collectives are Megatron's.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
    mask = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """As Megatron's examples: the batch by ``broadcast_data``, positions counted, no mask."""
    from megatron.core import tensor_parallel
    from megatron.core.utils import get_attr_wrapped_model

    if not (
        get_attr_wrapped_model(model, "pre_process")
        or get_attr_wrapped_model(model, "post_process")
    ):
        return model(None, None, None), None
    item = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], item, torch.int64)
    mask = tensor_parallel.broadcast_data(["loss_mask"], item, torch.float32)["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_of, mask)


def datasets(samples: Any, vp_stage: Any = None) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )

    def built() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and (
            mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        )

    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, built, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def train_plain(rank: int, world_size: int, argv: list[str], attention: str) -> list[float]:
    """Train with the command line ``argv``; returns the losses on ranks that have them.

    Args:
        rank: this rank.
        world_size: number of ranks.
        argv: Megatron's arguments.
        attention: ``megatron`` for Megatron's layers, ``sdpa`` for those of our model provider.
    """
    import os

    from megatron_taco.patching.cpu import CpuShim

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    shim = CpuShim().install()
    shim.install_megatron()
    import megatron.core.datasets.utils as data_utils
    import megatron.training.training as loop
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    data_utils.compile_helpers = lambda: None
    losses: list[float] = []
    log = loop.training_log

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        losses.extend(float(value) for value in loss_dict.values())
        return log(loss_dict, *args, **kwargs)

    loop.training_log = training_log
    sys.argv = ["plain", *argv]
    args = parse_and_validate_args()
    parts: list[Any] = [datasets, ModelType.encoder_or_decoder, forward_step]
    if hasattr(argument_utils, "gpt_config_from_args"):
        model = argument_utils.gpt_config_from_args(args)
        if attention == "sdpa":
            from megatron_taco.training.model import torch_block_spec

            model.transformer_layer_spec = torch_block_spec
        config = argument_utils.pretrain_cfg_container_from_args(args, model)
    else:  # 0.18 takes a function that builds the model
        from megatron_taco.training.model import ModelProvider
        from tests.distributed.users_script import model_provider

        config = argument_utils.pretrain_cfg_container_from_args(args)
        provider = ModelProvider(args, attention) if attention == "sdpa" else model_provider
        parts.insert(1, provider)
    loop.pretrain(config, *parts)
    return losses
