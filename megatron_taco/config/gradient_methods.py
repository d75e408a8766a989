"""Gradient methods with memory in `compression.data_parallel.gradients`: names and settings."""

from typing import Any, Final

_QUANTISER: Final = ("bits", "block", "transform", "scale")
SPARSELOCO: Final = "sparseloco"
"""The one method that changes when ranks take their steps."""

METHOD_SETTINGS: Final[dict[str, tuple[str, ...]]] = {
    "powersgd": ("rank", "error_feedback", "warm_start", "memory"),
    "topk": ("ratio", "selection", "error_feedback", "memory"),
    "tagc": ("ratio", "packing", "memory"),
    "pactrain": ("ternary", "memory"),
    "homomorphic": ("packing",),
    "cd_adam": (*_QUANTISER, "memory"),
    SPARSELOCO: (
        "local_steps",
        "ratio",
        "chunk",
        "residual_decay",
        "outer_lr",
        *_QUANTISER,
        "memory",
    ),
}
"""The settings of each method; `gradients/` has their meaning and their source."""

QUANTISED: Final = ("cd_adam", SPARSELOCO)
"""Methods that send codes of a block integer."""

QUANTISER_BITS: Final = 4
"""Of these, unless given. The papers' are the scaled sign (CD-Adam) and 2 bits (SparseLoCo), which
we do not have."""

LOCAL_STEPS: Final = 15
"""Of SparseLoCo, unless given (arXiv 2508.15706)."""


def method_settings(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a method's class, its compressor's settings apart.

    Args:
        name: Of the method.
        given: The settings that the configuration gives.
    """
    settings = {key: value for key, value in given.items() if key != "memory"}
    if name not in QUANTISED:
        return settings
    own = {key: value for key, value in settings.items() if key not in _QUANTISER}
    code = {key: value for key, value in settings.items() if key in _QUANTISER}
    return own | {"compressor": {"bits": QUANTISER_BITS} | code}
