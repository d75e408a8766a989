"""Calls Megatron's own training loop, whose signature depends on the release."""

from __future__ import annotations

import argparse
import inspect
from typing import Any


def train(args: argparse.Namespace, attention: str, store: Any) -> None:
    """Train with Megatron's ``pretrain`` and our model, data and step.

    Up to 0.18 it takes a function that builds a model; from 0.19 on a model's configuration.

    Args:
        args: Megatron's validated arguments, which are its global ones already.
        attention: whose attention and norms: ``sdpa`` for torch's, ``te`` for Transformer
            Engine's, ``megatron`` for Megatron's layers.
        store: the rendezvous store of the run.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_taco.training.datasets import train_valid_test_datasets_provider
    from megatron_taco.training.model import ModelProvider, model_config_from_args
    from megatron_taco.training.step import forward_step

    kind = ModelType.encoder_or_decoder
    provider = inspect.signature(pretrain).parameters["model_provider"]
    if provider.default is inspect.Parameter.empty:
        pretrain(
            pretrain_cfg_container_from_args(args),
            train_valid_test_datasets_provider,
            ModelProvider(args, attention),
            kind,
            forward_step,
            store=store,
        )
        return
    pretrain(
        pretrain_cfg_container_from_args(args, model_config_from_args(args, attention)),
        train_valid_test_datasets_provider,
        kind,
        forward_step,
        store=store,
    )
