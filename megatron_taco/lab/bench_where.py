"""Where a benchmark's ranks run, for all benchmarks that need several: arguments and start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_taco.cli.lab_arguments import (
    add_gpu_arguments,
    add_link_arguments,
    count,
    gpu_mode,
)
from megatron_taco.lab.link import LabError


def add_where_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where the ranks run."""
    where = parser.add_argument_group("where, unless torchrun or lab run started the ranks")
    where.add_argument("--ranks", type=count, metavar="N", help="N ranks over loopback")
    add_link_arguments(where)
    where.add_argument("--lab", metavar="NAME", help="use the hosts of this lab, which is up")
    where.add_argument("--ranks-per-host", type=count, default=1, metavar="K")
    add_gpu_arguments(where)


def on_ranks() -> bool:
    """Tells whether torchrun or the lab started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs ``command`` on the ranks that the arguments ask for.

    Args:
        args: Has what :func:`add_where_arguments` gives.
        command: Program and arguments.

    Returns:
        0, or the exit code of the first rank that failed.

    Raises:
        LabError: The arguments or this machine do not allow it.
    """
    from megatron_taco.cli.lab import in_lab
    from megatron_taco.lab.launch import launch
    from megatron_taco.lab.places import loopback_places

    in_link = args.hosts is not None or args.rate is not None or args.lab is not None
    if args.ranks is not None:
        if in_link:
            raise LabError("--ranks is for loopback; hosts with a rate take --ranks-per-host")
        return launch(list(command), loopback_places(args.ranks, gpus=gpu_mode(args)))
    if not in_link:
        raise LabError(
            "no ranks: start it with torchrun or megatron-taco lab run, or name --hosts N --rate "
            "RATE, --lab NAME or --ranks N"
        )
    return in_lab(args, list(command), quiet=True)
