"""The console script `megatron-taco`.

Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`; it is imported
only when it is asked for, so that `--help` needs neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from megatron_taco import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": (
        "megatron_taco.cli.doctor",
        "check Megatron, this machine and a configuration; says what to change",
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
    width = max(len(name) for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="megatron-taco",
        usage="megatron-taco COMMAND [arguments]",
        description="Train Megatron-LM over slow links.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
        + "\n\nmegatron-taco COMMAND --help tells the arguments of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-taco {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    name = parser.parse_args(arguments[:1]).command
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        parser.error(f"no command {name!r}; commands: {', '.join(COMMANDS)}{hint}")
    module_name, text = COMMANDS[name]
    module = importlib.import_module(module_name)
    subparser = argparse.ArgumentParser(prog=f"megatron-taco {name}", description=text)
    module.add_arguments(subparser)
    from megatron_taco.config.errors import ConfigError

    try:
        return int(module.run(subparser.parse_args(arguments[1:])))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
