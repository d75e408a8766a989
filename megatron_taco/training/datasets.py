"""The data provider: Megatron's own GPT data sets over .bin/.idx files, blends and mock data."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def _reads_data(vp_stage: int | None = None) -> bool:
    """Whether this rank reads the data set: the first of its group on the first or last stage."""
    return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron's data-set configuration from its arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )


def train_valid_test_datasets_provider(
    samples: list[int | None], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the training, validation and test sets on the ranks that read them.

    Args:
        samples: how many samples each of the three sets needs.
        vp_stage: virtual pipeline stage of the chunk, or None.
    """
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        kind, samples, partial(_reads_data, vp_stage=vp_stage), dataset_config(args)
    )
    train, valid, test = builder.build()
    return train, valid, test


# Every rank calls the provider (Megatron looks for this mark): it decides by itself who reads.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
