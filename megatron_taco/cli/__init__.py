"""The console script `megatron-taco`.

Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`; it is imported
only when it is asked for, so that `--help` needs neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_taco import __version__
from megatron_taco.cli.commands import Commands, dispatch, listing

COMMANDS: Commands = {
    "bench": (
        "megatron_taco.cli.bench",
        "measure what compression costs and saves here",
    ),
    "doctor": (
        "megatron_taco.cli.doctor",
        "check Megatron, this machine and a configuration; says what to change",
    ),
    "export": (
        "megatron_taco.cli.export",
        "write a run's model in one piece, its pipeline boundaries kept or folded in",
    ),
    "lab": (
        "megatron_taco.cli.lab",
        "run ranks behind links of any speed on this machine",
    ),
    "prepare-data": (
        "megatron_taco.cli.prepare_data",
        "turn text into the token files that Megatron reads",
    ),
}
"""Subcommand -> its module and one line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments without the program's name; `sys.argv` by default.

    Returns:
        0 when all is well, 1 when the subcommand found problems, 2 for a user's error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="megatron-taco",
        usage="megatron-taco COMMAND [arguments]",
        description="Train Megatron-LM over slow links.",
        epilog=listing("commands", COMMANDS)
        + "\n\nmegatron-taco COMMAND --help tells the arguments of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-taco {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    name = parser.parse_args(arguments[:1]).command
    from megatron_taco.config.errors import ConfigError

    try:
        return dispatch("megatron-taco", COMMANDS, name, arguments[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
