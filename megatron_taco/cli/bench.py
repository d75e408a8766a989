"""``megatron-taco bench``: what compression costs and what it saves, measured here.

Each benchmark is a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse

from megatron_taco.cli.commands import Commands, dispatch, listing

BENCHMARKS: Commands = {
    "collectives": (
        "megatron_taco.lab.bench_collectives",
        "all-reduce, reduce-scatter, all-gather: ours beside the backend's",
    ),
    "kernels": (
        "megatron_taco.lab.bench_kernels",
        "encode, decode and sums on one GPU: share of a copy's bandwidth, host time a call",
    ),
    "step": (
        "megatron_taco.lab.bench_step",
        "training steps: compressed beside uncompressed, and the limit",
    ),
}
"""Benchmark -> its module and one line of help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name of the benchmark; what follows is for that benchmark's own parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "megatron-taco bench BENCHMARK [arguments]"
    parser.epilog = listing("benchmarks", BENCHMARKS)
    parser.add_argument("benchmark", metavar="BENCHMARK", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs one benchmark.

    Returns:
        0; 1 if the benchmark says that its figures cannot be used; 2 for a user's error.
    """
    return dispatch("megatron-taco bench", BENCHMARKS, args.benchmark, args.arguments)
