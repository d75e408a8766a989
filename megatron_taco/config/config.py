"""The whole configuration of the trainer, resolved."""

from dataclasses import dataclass
from typing import Any

from megatron_taco.config.compression import Compression
from megatron_taco.config.data import Data
from megatron_taco.config.model import Model
from megatron_taco.config.run_section import Run, Telemetry
from megatron_taco.config.section import Section
from megatron_taco.config.settings import Settings, plain


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """A configuration whose keys are known, of the right type, and do not contradict each other.

    Attributes:
        run: Where the run is kept and runs.
        data: What is trained on.
        model: The architecture, with the preset resolved.
        megatron: Megatron-LM arguments by their own names, not yet seen by Megatron's parser.
            To be read only.
    """

    run: Run
    data: Data
    model: Model
    megatron: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return the configuration as nested mappings, lists and scalars."""
        return {
            name: plain(getattr(self, name)) if schema else dict(self.megatron)
            for name, schema in SECTIONS.items()
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
