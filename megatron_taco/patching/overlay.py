"""An object in which some names are ours and all others are the original's."""

from typing import Any


class Overlay:
    """A module, namespace or instance seen with some of its attributes replaced.

    Args:
        base: what all other attributes are read from.
        **names: the attributes that are ours.
    """

    def __init__(self, base: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)
