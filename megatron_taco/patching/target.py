"""One replaceable attribute of Megatron-LM or Transformer Engine, and the versions we know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Axis = Literal["tensor", "pipeline", "data", "telemetry", "startup"]

MEGATRON: Final = "megatron"
TRANSFORMER_ENGINE: Final = "transformer_engine"
DISTRIBUTIONS: Final = {MEGATRON: "megatron-core", TRANSFORMER_ENGINE: "transformer-engine"}
"""What pip calls the packages that targets are in."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One replaceable attribute of Megatron-LM or Transformer Engine.

    Attributes:
        name: Our name for it, `<axis>.<what>`.
        module: Dotted module that holds the attribute.
        attribute: Dotted path inside that module: a global, or `Class.method`.
        versions: PEP 440 specifier of the versions it is known in, of the distribution that its
            module belongs to.
        depends_on: Dotted objects of `module` whose source is fingerprinted because the wrapper
            relies on them; empty means `attribute` itself.
        also: Further objects of `module`, fingerprinted in the versions that have them.
        parameters: Parameter names which the target must have; empty means unchecked.
        axis: What the target belongs to.
        why: One line for people, shown by `megatron-taco doctor`.
    """

    name: str
    module: str
    attribute: str
    versions: str
    depends_on: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    axis: Axis
    why: str

    @property
    def path(self) -> str:
        """The dotted place: `module.attribute`."""
        return f"{self.module}.{self.attribute}"

    @property
    def fingerprinted(self) -> tuple[str, ...]:
        """The dotted objects of `module` whose source must be a known one."""
        return self.depends_on or (self.attribute,)

    @property
    def package(self) -> str:
        """The top-level package: ``megatron`` or ``transformer_engine``."""
        return self.module.split(".")[0]

    @property
    def distribution(self) -> str:
        """What pip calls it."""
        return DISTRIBUTIONS[self.package]


SUPPORTED = ">=0.18,<0.20"
"""The megatron-core versions all targets in Megatron are known in."""

TE_SUPPORTED = ">=2.10,<2.21"
"""The Transformer Engine versions all targets there are known in."""
