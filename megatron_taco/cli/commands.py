"""Commands that are modules, imported only when they are asked for."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Mapping, Sequence

Commands = Mapping[str, tuple[str, str]]
"""Name -> module, with ``add_arguments(parser)`` and ``run(args) -> int``; one line of help."""


def listing(title: str, commands: Commands) -> str:
    """Returns the names with their help, for the end of a help text."""
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in commands.items()]
    return "\n".join([f"{title}:", *lines])


def dispatch(program: str, commands: Commands, name: str, arguments: Sequence[str]) -> int:
    """Runs one of some commands.

    Args:
        program: What comes before the command's name on the command line.
        commands: The commands.
        name: Which one.
        arguments: Its arguments.

    Returns:
        Its exit code.

    Raises:
        SystemExit: With code 2 after one message, as argparse does it, if ``name`` is none of them.
    """
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        argparse.ArgumentParser(prog=program, usage=f"{program} NAME [arguments]").error(
            f"no command {name!r}; commands: {', '.join(commands)}{hint}"
        )
    module_name, text = commands[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"{program} {name}", description=text)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))
