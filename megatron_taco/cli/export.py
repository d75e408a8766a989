"""``megatron-taco export``: a model of a run with its boundaries in place, or without them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_taco.cli.lab_arguments import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add export's arguments."""
    parser.description = (
        "Read a checkpoint of a run, from any tensor- and pipeline-parallel size, measure what "
        "its boundaries do to held-out tokens, and write the model as one piece: with them, to be "
        "loaded with megatron_taco, or without them, as a plain model of Megatron's. Says which "
        "of the two is exact."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's configuration")
    parser.add_argument("--load", required=True, metavar="DIR", help="the run's checkpoints")
    parser.add_argument("--step", type=count, metavar="N", help="which; by default the latest")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--boundaries",
        choices=("keep", "fold"),
        default="keep",
        help="keep them in place, or fold them into Megatron's own weights (default: keep)",
    )
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="with fold: write a plain model also where it is another one than was trained",
    )
    parser.add_argument(
        "--sequences", type=count, default=8, metavar="N", help="to measure with; default 8"
    )
    parser.add_argument(
        "--random-tokens",
        action="store_true",
        help="measure with random tokens instead of the validation data",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="overrides of the configuration, as the run was given them",
    )


def run(args: argparse.Namespace) -> int:
    """Export.

    Returns:
        0; 1 where folding was asked for and is not exact; 2 for a user's mistake.
    """
    from megatron_taco.data.errors import DataError
    from megatron_taco.patching.errors import PatchError
    from megatron_taco.training.export import ExportError, export

    try:
        return export(
            args.config,
            args.overrides,
            checkpoints=Path(args.load),
            step=args.step,
            output=Path(args.output),
            fold=args.boundaries == "fold",
            approximate=args.approximate,
            sequences=args.sequences,
            random_tokens=args.random_tokens,
        )
    except (DataError, ExportError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
