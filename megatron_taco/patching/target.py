"""One replaceable attribute of Megatron-LM, and the versions that targets are known in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["tensor", "pipeline", "data", "telemetry", "startup"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One replaceable attribute of Megatron-LM.

    Attributes:
        name: Our name for it, `<axis>.<what>`.
        module: Dotted module that holds the attribute.
        attribute: Dotted path inside that module: a global, or `Class.method`.
        versions: PEP 440 specifier of the megatron-core versions it is known in.
        depends_on: Dotted objects of `module` whose source is fingerprinted because the wrapper
            relies on them; empty means `attribute` itself.
        parameters: Parameter names which the target must have; empty means unchecked.
        axis: What the target belongs to.
        why: One line for people, shown by `megatron-taco doctor`.
    """

    name: str
    module: str
    attribute: str
    versions: str
    depends_on: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    axis: Axis
    why: str

    @property
    def path(self) -> str:
        """The dotted place in Megatron: `module.attribute`."""
        return f"{self.module}.{self.attribute}"

    @property
    def fingerprinted(self) -> tuple[str, ...]:
        """The dotted objects of `module` whose source must be a known one."""
        return self.depends_on or (self.attribute,)


SUPPORTED = ">=0.18,<0.20"
"""The megatron-core versions all targets are known in."""
