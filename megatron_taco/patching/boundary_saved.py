"""What the checkpoint that a run is about to load says about boundaries.

Read before Megatron loads: a model with other boundaries would end in a message about tensors, or
in none where Megatron ignores what it does not know.
"""

from __future__ import annotations

import argparse
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint

from megatron_taco.patching.boundary_chunk import NAME
from megatron_taco.patching.errors import BoundaryError

_SECTION = "compression.pipeline_parallel"
_BOUNDARY = re.compile(rf"{re.escape(NAME)}\.boundaries\.after_layer_(\d+)\.")


def checkpoint_folder(args: argparse.Namespace) -> str | None:
    """The distributed checkpoint that ``megatron.load`` and ``megatron.ckpt_step`` name, or None.

    Args:
        args: Megatron's arguments.
    """
    from megatron.core.dist_checkpointing import check_is_distributed_checkpoint
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
    )

    if getattr(args, "load", None) is None:
        return None
    tracker = Path(get_checkpoint_tracker_filename(args.load))
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    step = text if getattr(args, "ckpt_step", None) is None else str(args.ckpt_step)
    release = step == "release"
    folder = get_checkpoint_name(
        args.load, 0 if release else int(step), release, return_base_dir=True
    )
    return folder if check_is_distributed_checkpoint(folder) else None


def saved_depths(args: argparse.Namespace) -> list[int] | None:
    """Depths of the boundaries in the checkpoint of ``megatron.load``.

    Args:
        args: Megatron's arguments.

    Returns:
        The depths, ascending; None if there is no distributed checkpoint to be loaded.
    """
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    folder = checkpoint_folder(args)
    if folder is None:
        return None
    keys = list(map(str, load_sharded_metadata(folder)))
    depths = {int(found.group(1)) for found in map(_BOUNDARY.match, keys) if found}
    return sorted(depths) or _depths_in_settings(keys, folder)


def _depths_in_settings(keys: Iterable[str], folder: str) -> list[int]:
    """Depths of boundaries that have no tensors to be saved: those that code each value."""
    key = next((key for key in keys if key.startswith(f"{NAME}.settings.")), None)
    if key is None:
        return []
    state: dict[str, Any] = {key: io.BytesIO()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load")
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return list(state[key][0]["after_layers"])


def check_saved(args: argparse.Namespace, depths: Sequence[int]) -> None:
    """Refuse a checkpoint whose boundaries are not those of this run.

    Args:
        args: Megatron's arguments, before it loads.
        depths: of this run's boundaries; empty where there are none.

    Raises:
        BoundaryError: with both lists of depths.
    """
    saved = saved_depths(args)
    if saved is None or saved == list(depths):
        return
    if not depths:
        raise BoundaryError(
            f"{_SECTION}.mode: off, but the checkpoint of megatron.load has boundaries after "
            f"layers {saved}, which are part of its model; set mode: on with the settings it was "
            "trained with (they are in place where no stage is cut)"
        )
    has = f"boundaries after layers {saved}" if saved else "no boundaries"
    raise BoundaryError(
        f"{_SECTION}.after_layers: {list(depths)}, but the checkpoint of megatron.load has {has}; "
        "a boundary is part of the model, so name the same depths or load another checkpoint"
    )
