"""Arguments about links and ranks that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_taco.lab.link import MTU, LabError, Link
from megatron_taco.lab.rates import default_burst, parse_rate
from megatron_taco.lab.sizes import parse_bytes


def count(text: str) -> int:
    """Parses a number of things, at least one."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number, at least 1, is needed, found {text!r}")
    return int(text)


def add_link_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the arguments that describe hosts and the link between them."""
    parser.add_argument("--hosts", type=count, metavar="N", help="emulated hosts, two or more")
    parser.add_argument(
        "--rate",
        type=checked(parse_rate),
        metavar="RATE",
        help="of each host's link, each way: 200Mbit, 1Gbit, 10Gbit, ...",
    )
    parser.add_argument("--mtu", type=count, default=MTU, metavar="BYTES", help=f"default {MTU}")
    parser.add_argument(
        "--burst",
        type=checked(parse_bytes),
        metavar="SIZE",
        help="token bucket; default 64KB up to 1Gbit, 256KB above: large ones flatter",
    )
    parser.add_argument(
        "--delay",
        type=microseconds,
        default=0,
        metavar="TIME",
        help="one way, for example 500us or 10ms; needs the kernel's netem",
    )


def add_gpu_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the choice of GPUs; by default each rank has its own where there are GPUs."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--share-gpu", action="store_true", help="all ranks on the first GPU")
    which.add_argument("--cpu", action="store_true", help="hide the GPUs from the ranks")


def gpu_mode(args: argparse.Namespace) -> str:
    """Returns one of ``places.GPU_MODES``."""
    return "share" if args.share_gpu else "none" if args.cpu else "own"


def link_of(args: argparse.Namespace) -> tuple[int, Link]:
    """Returns the hosts and the link that the arguments ask for.

    Raises:
        LabError: One of them is missing or does not go with another.
    """
    if args.hosts is None or args.rate is None:
        raise LabError("--hosts N and --rate RATE are needed, for example --hosts 2 --rate 1Gbit")
    if not 1280 <= args.mtu <= 65535:
        raise LabError(f"--mtu {args.mtu}: allowed are 1280 to 65535 bytes")
    burst = default_burst(args.rate) if args.burst is None else args.burst
    if burst < args.mtu + 14:
        raise LabError(
            f"--burst {burst}: below one frame ({args.mtu} bytes of --mtu and 14 of header), "
            "nothing would pass"
        )
    return args.hosts, Link(rate=args.rate, burst=burst, mtu=args.mtu, delay_us=args.delay)


def checked[T](parse: Callable[[str], T]) -> Callable[[str], T]:
    """Returns ``parse`` as a type for argparse, which then shows the message of its ValueError."""

    def with_message(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return with_message


def microseconds(text: str) -> int:
    """Parses times such as ``500us``, ``10ms`` or ``1s``."""
    for unit, factor in (("us", 1), ("ms", 1000), ("s", 1_000_000)):
        number = text.removesuffix(unit)
        if number != text and number.isdigit():
            return int(number) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is not a time; allowed: 500us, 10ms, 1s")


def words(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Returns a type for argparse: a list of some of ``allowed``."""

    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in allowed:
                raise ValueError(f"{word!r} is none of {', '.join(allowed)}")
        return words

    return checked(parse)
