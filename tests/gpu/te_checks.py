"""What each NCCL rank of ``test_transformer_engine_gpu.py`` checks: ``-m tests.gpu.te_checks``."""

import sys

from megatron_taco.lab.timing import process_group
from tests.distributed.test_transformer_engine import judge, look


def main() -> int:
    """Returns 0; a check that fails raises."""
    with process_group() as (_, device):
        judge(look(device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
