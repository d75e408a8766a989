"""``torchrun -m megatron_taco.pretrain --config FILE.yaml [dotted.key=value ...]``: the trainer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """The command line of the trainer."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m megatron_taco.pretrain",
        description="Train a GPT with Megatron's own loop and compressed communication.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the configuration with Megatron's own rules, print it resolved, and stop",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of the configuration, e.g. megatron.train_iters=20",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code: 0 done, 1 failed, 2 the user's mistake."""
    args = build_parser().parse_intermixed_args(argv)
    from megatron_taco.training.run import run

    return run(args.config, args.overrides, check_only=args.check)


if __name__ == "__main__":
    sys.exit(main())
