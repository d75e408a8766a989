"""Speed and losses on eight GPUs of one host: a rank a GPU.

Collectives, the hierarchical all-reduce between two emulated hosts (needs root: docs/lab.md),
steps of three models, and losses of GPT-350M with all axes compressed. Each part is one command of
under nine minutes; one that is there already is not run again. There is no Qwen2.5-7B at TP 8: 8
does not divide its 28 heads.

    scripts/reproduce/eight_gpus.sh --list
    scripts/reproduce/eight_gpus.sh --parts collectives
    scripts/reproduce/eight_gpus.sh --small            # on CPUs, over gloo
"""

from __future__ import annotations

import sys

from several_parts import NVLINK, RESULTS, Layout, losses, model_steps, operations, rate

from megatron_taco.lab.results import main

HEADING = "# Eight GPUs"
CUBE = Layout(tensor=2, pipeline=2, data=2)
PARTS = (
    *operations(8),
    *model_steps((Layout(tensor=4, pipeline=2), CUBE, Layout(tensor=8)), NVLINK),
    *model_steps((CUBE,), rate("25"))[:1],
    losses(8, CUBE),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, RESULTS / "eight-gpus.md", __doc__, heading=HEADING))
