"""Read and write a dotted attribute, keeping the raw entry of its holder.

`vars(cls)["method"]` is not `cls.method`: a static method, a class method or a property is a
descriptor there, and only putting the very descriptor back restores a class to what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


class _Missing:
    """Stands for an entry that its holder did not have itself."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Final = _Missing()


@dataclass(frozen=True)
class Slot:
    """Where one attribute is kept.

    Attributes:
        holder: The module or class that holds it.
        name: The attribute's own name in `holder`.
        raw: The entry in `vars(holder)`, or `MISSING` when a class inherits it.
    """

    holder: Any
    name: str
    raw: Any

    @property
    def original(self) -> Any:
        """What a wrapper calls: the function inside a static or class method, else the entry."""
        entry = getattr(self.holder, self.name) if self.raw is MISSING else self.raw
        return entry.__func__ if isinstance(entry, staticmethod | classmethod) else entry

    def wrap(self, new: Any) -> Any:
        """Return `new` in the kind of descriptor that the original was kept in."""
        if isinstance(self.raw, staticmethod | classmethod) and not isinstance(
            new, staticmethod | classmethod
        ):
            return type(self.raw)(new)
        return new

    def current(self) -> Any:
        """Return the raw entry as it is now, or `MISSING`."""
        return vars(self.holder).get(self.name, MISSING)

    def write(self, raw: Any) -> None:
        """Make `raw` the holder's own entry; `MISSING` removes the entry."""
        if raw is MISSING:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, raw)


def resolve(root: Any, dotted: str) -> Slot:
    """Find the slot of `dotted` below `root`.

    Args:
        root: A module or a class.
        dotted: `name` or `Class.name`, any depth.

    Returns:
        The slot with its raw entry.

    Raises:
        AttributeError: A part does not exist; the message names it and its holder.
    """
    *parents, name = dotted.split(".")
    holder = root
    for parent in parents:
        if not hasattr(holder, parent):
            raise AttributeError(f"{_name(holder)} has no {parent!r}")
        holder = getattr(holder, parent)
    raw = vars(holder).get(name, MISSING)
    if raw is MISSING and not hasattr(holder, name):
        raise AttributeError(f"{_name(holder)} has no {name!r}")
    return Slot(holder, name, raw)


def _name(holder: Any) -> str:
    return str(getattr(holder, "__qualname__", None) or getattr(holder, "__name__", repr(holder)))
