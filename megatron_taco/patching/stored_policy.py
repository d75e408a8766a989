"""Keeps the policy in Megatron's checkpoints, and finds it there again.

Megatron saves its arguments with every checkpoint.  The policy is one more attribute of them, of
plain dicts, lists and scalars, so nothing of Megatron's saving or loading is replaced and a
checkpoint with a policy loads without us.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from megatron_taco.collectives.policy import Policy

ATTRIBUTE: Final = "megatron_taco_policy"
DATA_ATTRIBUTE: Final = "megatron_taco_data_policy"
"""Of the tensor- and of the data-parallel axis."""


def keep(policy: Policy, args: argparse.Namespace, attribute: str = ATTRIBUTE) -> None:
    """Have the policy saved with every checkpoint from now on.

    Args:
        policy: the run's policy.
        args: Megatron's arguments, the very object that it saves.
        attribute: of the arguments, which gets it.
    """
    setattr(args, attribute, policy.to_dict())


def resumed_from(args: argparse.Namespace) -> str | None:
    """The folder of the checkpoint that this run goes on from, or None if it begins anew.

    Args:
        args: Megatron's arguments after it has loaded.
    """
    from megatron.training.checkpointing import get_checkpoint_name, get_loaded_iteration

    iteration = get_loaded_iteration()
    if args.load is None or args.finetune or iteration is None or iteration <= 0:
        return None
    folder: str = get_checkpoint_name(args.load, iteration, return_base_dir=True)
    return folder


def read(folder: str, attribute: str = ATTRIBUTE) -> tuple[Policy | None, str]:
    """The policy in a checkpoint; one rank alone may call this.

    Args:
        folder: the checkpoint's folder.
        attribute: of Megatron's arguments, which has it.

    Returns:
        The policy and an empty string, or None and why there is none.
    """
    record, why = read_attribute(folder, attribute)
    if record is None:
        return None, why
    try:
        return Policy.from_dict(record), ""
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        return None, _unreadable(error)


def read_attribute(folder: str, name: str) -> tuple[Any, str]:
    """What Megatron's arguments in a checkpoint have by a name; one rank alone may call this.

    Args:
        folder: the checkpoint's folder.
        name: the attribute.

    Returns:
        It and an empty string, or None and why there is none.
    """
    from megatron.core import dist_checkpointing

    try:
        if not dist_checkpointing.check_is_distributed_checkpoint(folder):
            return None, "the checkpoint is not one of Megatron's distributed checkpoints"
        args = dist_checkpointing.load_common_state_dict(folder).get("args")
        record = getattr(args, name, None)
        return record, "" if record is not None else "the checkpoint holds none"
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        return None, _unreadable(error)


def _unreadable(error: Exception) -> str:
    return f"the checkpoint's cannot be read ({type(error).__name__}: {error})"
