"""Several ranks on one GPU: ``python -m megatron_taco.lab.shared_gpu --ranks 4 -- -m MODULE ...``.

The same as ``megatron-taco lab run --ranks 4 --share-gpu -- -m MODULE ...``.

NCCL refuses two ranks on one GPU of one host, but takes the host's name from ``NCCL_HOSTID``.  With
a different one for each rank it believes in as many hosts and sends everything over sockets, here
over the loopback interface.  So tensor, pipeline and data parallelism run on real GPU memory and on
NCCL with a single card.  The ranks share the card's time: losses and ratios mean something,
absolute times do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_taco.lab.launch import command_line, launch
from megatron_taco.lab.places import loopback_places


def run_ranks(ranks: int, arguments: Sequence[str], *, timeout_s: float | None = None) -> int:
    """Runs Python with ``arguments`` once for each rank; see :func:`launch` for what it returns."""
    return launch([sys.executable, *arguments], loopback_places(ranks), timeout_s=timeout_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code of the first rank that failed, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_taco.lab.shared_gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on the GPU")
    parser.add_argument("--timeout", type=float, help="seconds after which all ranks are killed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what Python runs, after --")
    args = parser.parse_args(argv)
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: at least 1")
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if not arguments:
        parser.error("nothing to run: give Python's arguments after --")
    return launch(command_line(arguments), loopback_places(args.ranks), timeout_s=args.timeout)


if __name__ == "__main__":
    sys.exit(main())
