"""Run a Megatron training script without this package's compression, and note its losses exactly.

    torchrun ... plain_script.py --losses FILE [--device cpu] pretrain_gpt.py FLAGS

All that is done to Megatron is what it needs to start (`megatron-taco doctor` lists those repairs)
and a look at the losses it logs. Rank WORLD_SIZE - 1, on the last stage, writes a line a step.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_taco.drop_in.script import run_script
from megatron_taco.patching.after_import import AfterImport


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu"])
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    shim = None
    if args.device == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        from megatron_taco.patching.cpu import CpuShim

        shim = CpuShim().install()

    def loop_is_there() -> None:
        from megatron_taco.patching.registry import Registry
        from megatron_taco.patching.startup import repair

        if shim is not None:
            shim.install_megatron()
        repairs = Registry()
        repair(repairs)
        repairs.apply()
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            note_losses(args.losses)

    AfterImport("megatron.training.training", loop_is_there).install()
    run_script(args.script, args.arguments)


def note_losses(path: Path) -> None:
    loop = sys.modules["megatron.training.training"]
    original: Any = loop.training_log  # type: ignore[attr-defined]
    signature = inspect.signature(original)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        losses = {key: float(value) for key, value in given["loss_dict"].items()}
        with path.open("a") as file:
            file.write(json.dumps({"iteration": given["iteration"], **losses}) + "\n")
        return original(*args, **kwargs)

    loop.training_log = training_log  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
