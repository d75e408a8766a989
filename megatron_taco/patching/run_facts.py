"""What a run's messages are, and what a policy for them depends on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from megatron_taco.collectives.policy import Fact
from megatron_taco.config.tensor_parallel import TensorParallel

_NOT_OF_A_POLICY = frozenset({"mode", "start_step", "forward_chunks"})
_SIZES = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)


@dataclass(frozen=True)
class Messages:
    """The tensors that tensor parallelism sends: all roles send activations of one shape.

    Attributes:
        training: Elements of the whole tensor of a training micro-batch.
        evaluation: The same of an evaluation micro-batch.
        dtype: Their dtype.
    """

    training: int
    evaluation: int
    dtype: torch.dtype

    @property
    def largest_bytes(self) -> int:
        """Size of the largest whole tensor in bytes."""
        return max(self.training, self.evaluation) * self.dtype.itemsize

    @classmethod
    def of(cls, args: argparse.Namespace) -> Messages:
        """The messages that Megatron's arguments mean: sequence x micro-batch x hidden size."""
        row = args.seq_length // args.context_parallel_size * args.hidden_size
        return cls(row * args.micro_batch_size, row * args.eval_micro_batch_size, args.params_dtype)


def current_device() -> torch.device:
    """The device of this rank; the CPU under the CPU shim."""
    return torch.device(torch.cuda.current_device())


def facts(
    args: argparse.Namespace, settings: TensorParallel, messages: Messages
) -> dict[str, Fact]:
    """What measurements hold for, as flat keys that people know.

    Args:
        args: Megatron's arguments.
        settings: the section ``compression.tensor_parallel``.
        messages: the messages of the run.
    """
    found = machine(args)
    for key, value in settings.plain().items():
        if key not in _NOT_OF_A_POLICY:
            found[f"compression.tensor_parallel.{key}"] = value
    found["message_elements"] = messages.training
    found["message_dtype"] = str(messages.dtype).removeprefix("torch.")
    return found


def machine(args: argparse.Namespace) -> dict[str, Fact]:
    """The parallel sizes of a run and its kind of device.

    Args:
        args: Megatron's arguments.
    """
    device = current_device()
    found: dict[str, Fact] = {name: getattr(args, name) for name in _SIZES}
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return found
