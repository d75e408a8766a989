"""``megatron-taco lab``: ranks behind links of any speed, on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megatron_taco.cli.lab_arguments import (
    add_gpu_arguments,
    add_link_arguments,
    checked,
    count,
    gpu_mode,
    link_of,
)
from megatron_taco.lab.link import Lab, LabError
from megatron_taco.lab.sizes import parse_sizes

_EPILOG = """\
examples:
  megatron-taco lab run --hosts 2 --rate 10Gbit --share-gpu -- -m megatron_taco.pretrain --config F
  megatron-taco lab run --ranks 2 --share-gpu -- train.py        (over loopback; no root needed)
  megatron-taco lab check --hosts 2 --rate 1Gbit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of ``lab``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    run = commands.add_parser("run", help="run a program as ranks on hosts; then remove the hosts")
    add_link_arguments(run)
    run.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="instead of hosts and a rate: N ranks over loopback, at its speed, without root",
    )
    _add_rank_arguments(run)
    run.add_argument("--timeout", type=float, metavar="S", help="seconds until all is killed")
    run.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- ...",
        help="-m MODULE, a .py file, or a program; with its arguments",
    )
    run.set_defaults(function=_run)

    up = commands.add_parser("up", help="make hosts that stay, for several runs")
    add_link_arguments(up)
    up.set_defaults(function=_up)

    down = commands.add_parser(
        "down", help="remove all hosts that lab made, and kill what runs on them"
    )
    down.add_argument("--lab", metavar="NAME", help="only this one (default: all)")
    down.set_defaults(function=_down)

    check = commands.add_parser(
        "check", help="is the link as slow as it says? exit code 1 if it is not"
    )
    add_link_arguments(check)
    _add_rank_arguments(check)
    check.add_argument("--sizes", default="16MiB,128MiB", type=checked(parse_sizes), metavar="LIST")
    check.add_argument("--repeats", type=count, default=3, metavar="N")
    check.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    check.set_defaults(function=_check)


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lab", metavar="NAME", help="use the hosts of this lab, which is up")
    parser.add_argument("--ranks-per-host", type=count, default=1, metavar="K")
    add_gpu_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 for a link that is not what it says, or 2 after one message for what this machine
        or the user has to have different; for ``run`` else the exit code of the first rank that
        failed; 128 + the signal after Ctrl-C and the like.
    """
    function: Callable[[argparse.Namespace], int] = args.function
    try:
        return function(args)
    except LabError as error:
        print(f"megatron-taco lab: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from megatron_taco.lab.launch import command_line, launch
    from megatron_taco.lab.places import loopback_places

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise LabError("nothing to run: put -- and then -m MODULE, a .py file or a program")
    if args.ranks is None:
        return in_lab(args, command_line(words), timeout_s=args.timeout)
    if args.hosts is not None or args.rate is not None or args.lab is not None:
        raise LabError("--ranks is for loopback; hosts with a rate take --ranks-per-host")
    places = loopback_places(args.ranks, gpus=gpu_mode(args))
    return launch(command_line(words), places, timeout_s=args.timeout)


def in_lab(
    args: argparse.Namespace,
    command: list[str],
    *,
    timeout_s: float | None = None,
    quiet: bool = False,
) -> int:
    """Runs a command on the hosts that the arguments ask for; see :func:`run` for the result.

    Args:
        args: Has what ``add_link_arguments``, ``--lab`` and ``--ranks-per-host`` give.
        command: Program and arguments.
        timeout_s: Seconds until all is killed.
        quiet: Leave out torch's warnings from C++: it asks for the name of every address, and the
            lab's have none.

    Raises:
        LabError: The arguments or this machine do not allow it.
    """
    from megatron_taco.lab import links
    from megatron_taco.lab.launch import launch
    from megatron_taco.lab.places import lab_places
    from megatron_taco.lab.signals import Caught

    with ExitStack() as stack:
        caught = stack.enter_context(Caught())
        if args.lab is not None:
            if args.hosts is not None or args.rate is not None:
                raise LabError("--lab has its hosts and rate already: leave --hosts, --rate out")
            lab = links.read(args.lab)
        else:
            hosts, link = link_of(args)
            lab = stack.enter_context(links.temporary(hosts, link))
        places = lab_places(lab, args.ranks_per_host, gpus=gpu_mode(args))
        if quiet:
            level = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
            places = [replace(p, environment={**p.environment, **level}) for p in places]
        print(f"megatron-taco lab: {_describe(lab)}", file=sys.stderr, flush=True)
        return launch(command, places, timeout_s=timeout_s, caught=caught)


def _up(args: argparse.Namespace) -> int:
    from megatron_taco.lab import links
    from megatron_taco.lab.signals import Caught

    with Caught() as caught:
        lab = links.create(*link_of(args))
        if caught.exit_code is not None:
            links.destroy(lab.name)
            return caught.exit_code
    print(f"{_describe(lab)}; use it with --lab {lab.name}, remove it with lab down")
    return 0


def _down(args: argparse.Namespace) -> int:
    from megatron_taco.lab import links, namespaces
    from megatron_taco.lab.signals import Caught

    namespaces.require()
    with Caught():
        found = links.find() if args.lab is None else [args.lab]
        for name in found:
            there = name in links.find()
            killed = links.destroy(name)
            also = f", killed processes {', '.join(map(str, killed))}" if killed else ""
            print(f"removed {name}{also}" if there else f"{name} is not up")
    if not found:
        print("no lab is up")
    return 0


def _check(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "megatron_taco.lab.link_check"]
    command += ["--sizes", ",".join(map(str, args.sizes)), "--repeats", str(args.repeats)]
    if args.json is not None:
        command += ["--json", str(args.json)]
    return in_lab(args, command, quiet=True)


def _describe(lab: Lab) -> str:
    return f"{lab.name}: {lab.hosts} hosts, {lab.link}"
