"""What any run of ours is told: the compression, what is recorded, and where each value came from.

The trainer's `Config` adds the rest of a run; a user's own script brings that itself.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron_taco.config import canonical
from megatron_taco.config.compression import Compression
from megatron_taco.config.errors import Problem
from megatron_taco.config.run_section import Telemetry
from megatron_taco.config.section import Section
from megatron_taco.config.source import Origins


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sections `compression` and `telemetry`, valid by themselves.

    Two are equal if all their values are; where the values came from does not count.

    Attributes:
        compression: What is compressed and how.
        telemetry: What is recorded.
        origins: Where each value came from.
    """

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
        """Return the settings as nested mappings, lists and scalars."""
        return {name: plain(getattr(self, name)) for name in ("compression", "telemetry")}

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
        """Return the settings as YAML; loading it gives equal ones."""
        return canonical.to_yaml(self.plain())


def plain(section: Section) -> dict[str, Any]:
    """Return a section and the sections in it as nested mappings."""
    return {
        name: plain(value) if isinstance(value, Section) else value
        for name, value in section.plain().items()
    }
