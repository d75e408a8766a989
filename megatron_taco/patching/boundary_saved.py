"""What the checkpoint that a run is about to load says about boundaries.

Read before Megatron loads: a model with other boundaries would end in a message about tensors, or
in none where Megatron ignores what it does not know.
"""

from __future__ import annotations

import argparse
import io
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint

from megatron_taco.patching.boundary_chunk import NAME
from megatron_taco.patching.boundary_settings import CODE, SECTION, check
from megatron_taco.patching.errors import BoundaryError

_BOUNDARY = re.compile(rf"{re.escape(NAME)}\.boundaries\.after_layer_(\d+)\.")


def checkpoint_folder(args: argparse.Namespace) -> str | None:
    """The distributed checkpoint that Megatron will load, or None.

    It is named by ``megatron.load`` (else ``megatron.pretrained_checkpoint``) and
    ``megatron.ckpt_step``.

    Args:
        args: Megatron's arguments.
    """
    from megatron.core.dist_checkpointing import check_is_distributed_checkpoint
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
    )

    def tracker(folder: str) -> Path:
        return Path(get_checkpoint_tracker_filename(folder))

    # Megatron takes the second where the first has none.
    named = (getattr(args, name, None) for name in ("load", "pretrained_checkpoint"))
    load = next((each for each in named if each and tracker(each).is_file()), None)
    if load is None:
        return None
    asked = getattr(args, "ckpt_step", None)
    step = tracker(load).read_text("utf-8").strip() if asked is None else str(asked)
    release = step == "release"
    if not release and not step.isdecimal():
        return None  # Megatron or data_checks say what is wrong with it
    folder = get_checkpoint_name(load, 0 if release else int(step), release, return_base_dir=True)
    return folder if check_is_distributed_checkpoint(folder) else None


def saved_boundaries(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the checkpoint of ``megatron.load`` says of its boundaries.

    Args:
        args: Megatron's arguments.

    Returns:
        See ``boundary_settings.described``; of an older checkpoint as many of these keys as can be
        told. Empty where there are no boundaries, None if no distributed checkpoint is to be
        loaded.
    """
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    folder = checkpoint_folder(args)
    if folder is None:
        return None
    keys = list(map(str, load_sharded_metadata(folder)))
    found = _settings(keys, folder)
    depths = {int(key.group(1)) for key in map(_BOUNDARY.match, keys) if key}
    if depths:
        found.setdefault("after_layers", sorted(depths))
    if any(".there.codebook." in key for key in keys):
        found.setdefault(CODE, "rvq")  # older than this key: seen by its tensors alone
    return found


def saved_depths(args: argparse.Namespace) -> list[int] | None:
    """Depths of the boundaries in the checkpoint of ``megatron.load``.

    Args:
        args: Megatron's arguments.

    Returns:
        The depths, ascending; None if there is no distributed checkpoint to be loaded.
    """
    saved = saved_boundaries(args)
    return None if saved is None else list(saved.get("after_layers", ()))


def _settings(keys: Iterable[str], folder: str) -> dict[str, Any]:
    """The entry of the settings, which is an object; empty if there is none."""
    key = next((key for key in keys if key.startswith(f"{NAME}.settings.")), None)
    if key is None:
        return {}
    state: dict[str, Any] = {key: io.BytesIO()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load")
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return dict(state[key][0])


def check_saved(args: argparse.Namespace, here: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose boundaries are not those of this run.

    Args:
        args: Megatron's arguments, before it loads.
        here: of this run, see ``boundary_settings.described``; empty where it has none.

    Raises:
        BoundaryError: with every key that differs, and both values.
    """
    saved = saved_boundaries(args)
    if saved is None:
        return
    there, depths = list(saved.get("after_layers", ())), list(here.get("after_layers", ()))
    if there and not depths:
        raise BoundaryError(
            f"{SECTION}.mode: off, but the checkpoint of megatron.load has boundaries after "
            f"layers {there}, which are part of its model; set mode: on with the settings it was "
            "trained with (they are in place where no stage is cut)"
        )
    if there != depths:
        has = f"boundaries after layers {there}" if there else "no boundaries"
        raise BoundaryError(
            f"{SECTION}.after_layers: {depths}, but the checkpoint of megatron.load has {has}; "
            "a boundary is part of the model, so name the same depths or load another checkpoint"
        )
    if here.get(CODE) == "rvq":
        saved = {CODE: "no codebooks", **saved}
    check(saved, here)
