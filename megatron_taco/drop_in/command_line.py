"""The command line of ``megatron_taco.launch``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_taco.config.drop_in import DROP_IN_SECTIONS
from megatron_taco.config.errors import ConfigError

_EPILOG = """\
Keys of the file can be given alone, before the script or among its flags:
  --compression.tensor_parallel.mode on --compression.tensor_parallel.min_bytes 256KiB
All other flags after the script's name are the script's own."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be launched and how.

    Attributes:
        script: path of the user's script.
        arguments: the script's command line.
        compression: path of the YAML file, or None.
        overrides: ``dotted.key=value`` from dotted flags.
        device: ``cpu`` where Megatron is to be run without a GPU, or None.
        run_dir: folder for figures, or None for the default.
    """

    script: str
    arguments: tuple[str, ...]
    compression: str | None
    overrides: tuple[str, ...]
    device: str | None
    run_dir: str | None


def build_parser() -> argparse.ArgumentParser:
    """The parser of everything but the dotted flags."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m megatron_taco.launch",
        description="Run a Megatron-LM training script, unedited, with compressed communication.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--compression", metavar="FILE", help="YAML with `compression:` and maybe `telemetry:`"
    )
    parser.add_argument(
        "--device",
        choices=["cpu"],
        help="run Megatron without a GPU (the script still needs the flags for gloo)",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder for metrics.jsonl and descriptions (default: megatron_taco/ in the "
        "script's --save, else megatron_taco_runs/SCRIPT)",
    )
    parser.add_argument("script", help="the training script, e.g. pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own flags")
    return parser


def parse(argv: Sequence[str]) -> Launch:
    """Read a command line.

    Args:
        argv: arguments without the program's name.

    Raises:
        ConfigError: a dotted flag has no value, or nothing says what to compress.
        SystemExit: with code 2 after a message, as argparse does it; or 0 after help.
    """
    overrides, rest = take_dotted(argv)
    args = build_parser().parse_args(rest)
    if args.compression is None and not overrides:
        raise ConfigError(
            "command line: nothing says what to compress; give --compression FILE, or "
            "--compression.tensor_parallel.mode on"
        )
    return Launch(
        script=args.script,
        arguments=tuple(args.arguments),
        compression=args.compression,
        overrides=tuple(overrides),
        device=args.device,
        run_dir=args.run_dir,
    )


def take_dotted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take the dotted flags of our sections out of a command line.

    Args:
        argv: ``--compression.a.b value`` or ``--compression.a.b=value`` among other arguments.

    Returns:
        ``compression.a.b=value`` for each, in order, and all other arguments.

    Raises:
        ConfigError: the last one has no value.
    """
    prefixes = tuple(f"--{section}." for section in DROP_IN_SECTIONS)
    overrides, rest = [], []
    waiting = iter(argv)
    for argument in waiting:
        if not argument.startswith(prefixes):
            rest.append(argument)
            continue
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals:
            following = next(waiting, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"command line: {argument}: no value; write {argument} VALUE")
            value = following
        overrides.append(f"{key}={value}")
    return overrides, rest
