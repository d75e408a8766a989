"""What a model's boundaries are, as its checkpoints say it: all that makes them another model.

How they are trained (rates, moves, the code of gradients) is not among it, and may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron_taco.boundaries import BoundarySettings, RvqSettings
from megatron_taco.boundaries.build import PROJECTED
from megatron_taco.boundaries.chain import STATIC
from megatron_taco.boundaries.quantizers import blockwise
from megatron_taco.patching.errors import BoundaryError

SECTION = "compression.pipeline_parallel"
CODE = "quantizer.forward.kind"
_RVQ = ("width", "rounds", "codes", "warmup_steps")
"""Sizes of codebooks, and the step from which they are in force."""


def described(settings: BoundarySettings, depths: Sequence[int]) -> dict[str, Any]:
    """What checkpoints keep, by key of the section.

    ``seed`` is there where something is not saved but drawn again: static anchors, the start from
    which a learned projector's angles are measured, the order of a codebook's parts.

    Args:
        settings: of all boundaries.
        depths: of the whole model.
    """
    code = settings.forward
    found: dict[str, Any] = {
        "boundary": settings.kind,
        "after_layers": list(depths),
        "rank": settings.rank,
        "anchors": settings.anchors,
        CODE: code.kind,
    }
    if code.kind == "rvq":
        rvq = RvqSettings(**code.options)  # type: ignore[arg-type]
        found |= {f"quantizer.forward.{name}": getattr(rvq, name) for name in _RVQ}
    elif code.kind != "none":
        coder: Any = blockwise(code.kind, settings.rank, **code.options).compressor  # type: ignore[arg-type]
        found |= {"quantizer.forward.block": coder.block}
        found |= {"quantizer.forward.rotation": coder.rotation}
    moves = settings.kind in PROJECTED and PROJECTED[settings.kind].update != "none"
    if settings.anchors == STATIC or moves or code.kind == "rvq":
        found["seed"] = settings.seed
    if settings.anchors == STATIC:
        found["anchor_std"] = settings.anchor_std
    return found


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """One phrase for each key that differs: the key, what is set, what the checkpoint has.

    Keys that one of the two lacks say nothing: they follow from others, or the checkpoint is older
    than they are.

    Args:
        saved: of the checkpoint.
        here: of this run.
    """
    return [
        f"{SECTION}.{key}: {value!r}, but the checkpoint of megatron.load has {saved[key]!r}"
        for key, value in here.items()
        if key in saved and saved[key] != value
    ]


def check(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with other boundaries.

    Args:
        saved: of the checkpoint.
        here: of this run.

    Raises:
        BoundaryError: with every key that differs, and both values.
    """
    found = differences(saved, here)
    if found:
        raise BoundaryError(
            f"{'; '.join(found)}; a boundary is part of the model, so set what the checkpoint has, "
            "or load another one"
        )


class SavedSettings(nn.Module):
    """The description, as an entry of the checkpoint.

    Args:
        settings: of all boundaries.
        depths: of the whole model.
    """

    def __init__(self, settings: BoundarySettings, depths: Sequence[int]) -> None:
        super().__init__()
        self.described = described(settings, depths)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the description for ``state_dict``."""
        return self.described

    def set_extra_state(self, state: Any) -> None:
        """Refuse a ``state_dict`` with other boundaries.

        Raises:
            BoundaryError: with every key that differs, and both values.
        """
        check(state, self.described)
