"""The whole configuration, resolved."""

from dataclasses import dataclass, field
from typing import Any

from megatron_taco.config import canonical
from megatron_taco.config.compression import Compression
from megatron_taco.config.data import Data
from megatron_taco.config.errors import Problem
from megatron_taco.config.model import Model
from megatron_taco.config.run_section import Run, Telemetry
from megatron_taco.config.section import Section
from megatron_taco.config.source import Origins


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration whose keys are known, of the right type, and do not contradict each other.

    Two are equal if all their values are; where the values came from does not count.

    Attributes:
        run: Where the run is kept and runs.
        data: What is trained on.
        model: The architecture, with the preset resolved.
        megatron: Megatron-LM arguments by their own names, not yet seen by Megatron's parser.
            To be read only.
        compression: What is compressed and how.
        telemetry: What is recorded.
        origins: Where each value came from.
    """

    run: Run
    data: Data
    model: Model
    megatron: dict[str, Any]
    compression: Compression
    telemetry: Telemetry
    origins: Origins = field(compare=False, repr=False)

    def where(self, dotted: str) -> str:
        """Return where a key's value came from.

        Returns:
            `file:line`, `command line`, `preset NAME`, or `default`.
        """
        return self.origins.where(dotted)

    def problem(self, dotted: str, message: str) -> Problem:
        """Return a problem with one key, with its place, to be raised as a `ConfigError`."""
        location, key = self.origins.place(dotted)
        return Problem(location=location, key=key, message=message)

    def plain(self) -> dict[str, Any]:
        """Return the configuration as nested mappings, lists and scalars."""
        tree = {name: _plain(getattr(self, name)) for name in SECTIONS}
        tree["megatron"] = dict(self.megatron)
        return tree

    def canonical(self) -> dict[str, canonical.Scalar]:
        """Return the flat form that all ranks of a run must share.

        Dotted keys in sorted order, the preset resolved into model keys, lists as JSON text, and
        nothing that belongs to one host alone (`canonical.HOST_ONLY`).
        """
        flat = canonical.flatten(self.plain())
        return {
            key: value
            for key, value in flat.items()
            if value is not None and key != "model.preset" and not canonical.is_host_only(key)
        }

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; loading it gives an equal `Config`."""
        return canonical.to_yaml(self.plain())


def _plain(section: Section | dict[str, Any]) -> dict[str, Any]:
    if isinstance(section, dict):
        return dict(section)
    return {
        name: _plain(value) if isinstance(value, Section) else value
        for name, value in section.plain().items()
    }


SECTIONS: dict[str, type[Section] | None] = {
    "run": Run,
    "data": Data,
    "model": Model,
    "megatron": None,
    "compression": Compression,
    "telemetry": Telemetry,
}
"""Sections in the order in which they are written; `megatron` has no schema of its own."""
