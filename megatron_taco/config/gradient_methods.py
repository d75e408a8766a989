"""Gradient methods with memory in `compression.data_parallel.gradients`: names and settings."""

from typing import Any, Final

METHOD_SETTINGS: Final[dict[str, tuple[str, ...]]] = {
    "powersgd": ("rank", "error_feedback", "warm_start", "memory"),
    "topk": ("ratio", "selection", "error_feedback", "memory"),
    "tagc": ("ratio", "packing", "memory"),
    "pactrain": ("ternary", "memory"),
    "homomorphic": ("packing",),
    "cd_adam": ("bits", "block", "transform", "scale", "memory"),
}
"""The settings of each method; `gradients/` has their meaning and their source."""

CD_ADAM_BITS: Final = 4
"""Of CD-Adam's compressor, unless given; the paper's is the scaled sign, which we do not have."""

SPARSELOCO: Final = (
    "'sparseloco' is not in the trainer: its ranks take steps apart from each other, each with "
    "weights and Adam moments of its own, of which Megatron's checkpoints hold one rank's; "
    "choose another compressor, or use megatron_taco.gradients.SparseLoCo in a loop of your own"
)


def not_sparseloco(value: object) -> object:
    """Refuse the one method that changes when ranks take their steps.

    Raises:
        ValueError: It is asked for.
    """
    if value == "sparseloco":
        raise ValueError(SPARSELOCO)
    return value


def method_settings(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a method's class, its compressor's settings apart.

    Args:
        name: Of the method.
        given: The settings that the configuration gives.
    """
    settings = {key: value for key, value in given.items() if key != "memory"}
    if name == "cd_adam":
        return {"compressor": {"bits": CD_ADAM_BITS} | settings}
    return settings
