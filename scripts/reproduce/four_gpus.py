"""Speed and losses on four GPUs of one host: a rank a GPU.

Collectives, the hierarchical all-reduce between two emulated hosts (needs root: docs/lab.md),
steps of three models, and losses of GPT-350M with all axes compressed. Each part is one command of
under nine minutes; one that is there already is not run again.

    scripts/reproduce/four_gpus.sh --list
    scripts/reproduce/four_gpus.sh --parts collectives
    scripts/reproduce/four_gpus.sh --small             # on CPUs, over gloo
"""

from __future__ import annotations

import sys

from several_parts import NVLINK, RESULTS, Layout, losses, model_steps, operations, rate

from megatron_taco.lab.results import main

HEADING = "# Four GPUs"
PARTS = (
    *operations(4),
    *model_steps(
        (Layout(tensor=4), Layout(tensor=2, pipeline=2), Layout(tensor=2, data=2)), NVLINK
    ),
    *model_steps((Layout(tensor=2, pipeline=2),), rate("25"))[:1],
    losses(4, Layout(tensor=2, pipeline=2)),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, RESULTS / "four-gpus.md", __doc__, heading=HEADING))
