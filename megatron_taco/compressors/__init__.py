"""Tensors to bytes and back: plain torch on any device, no process group."""

from difflib import get_close_matches

from megatron_taco.compressors.base import Compressor
from megatron_taco.compressors.block_integer import BlockInteger
from megatron_taco.compressors.taco import Taco

__all__ = ["COMPRESSORS", "BlockInteger", "Compressor", "Taco", "build"]

COMPRESSORS: dict[str, type[Compressor]] = {kind.name: kind for kind in (Taco, BlockInteger)}


def build(name: str, **settings: object) -> Compressor:
    """Return the compressor called ``name`` with the settings of its class.

    Raises:
        ValueError: If there is no such compressor or setting, or a setting has a bad value.
    """
    if name not in COMPRESSORS:
        raise ValueError(f"compressor is {name!r}, allowed are {', '.join(sorted(COMPRESSORS))}")
    kind = COMPRESSORS[name]
    allowed = tuple(getattr(kind, "__dataclass_fields__", {}))
    allowed = tuple(field for field in allowed if field != "name")
    for key in settings:
        if key not in allowed:
            near = get_close_matches(key, allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{name}: there is no setting {key!r}, allowed are {', '.join(allowed)}{hint}"
            )
    return kind(**settings)
