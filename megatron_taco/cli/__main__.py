"""`python -m megatron_taco.cli` is the console script, for a tree that is not installed."""

import sys

from megatron_taco.cli import main

if __name__ == "__main__":
    sys.exit(main())
