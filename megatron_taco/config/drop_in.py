"""Settings for a user's own script: only `compression` and `telemetry`, from a file or from flags.

Model, data and Megatron's arguments are the script's business, so that keys for them are mistakes
here; so are the parts of `telemetry` for which the script has flags of Megatron's own.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from megatron_taco.config.compression import Compression
from megatron_taco.config.config import SECTIONS
from megatron_taco.config.errors import ConfigError, Problem, allowed_text
from megatron_taco.config.loader import read_text, validated
from megatron_taco.config.messages import shown
from megatron_taco.config.overrides import apply_override
from megatron_taco.config.run_section import Telemetry
from megatron_taco.config.section import Section
from megatron_taco.config.settings import Settings
from megatron_taco.config.source import COMMAND_LINE, Origins
from megatron_taco.config.yaml_source import read_yaml

DROP_IN_SECTIONS: Final[dict[str, type[Section]]] = {
    "compression": Compression,
    "telemetry": Telemetry,
}
"""The sections that a user's own script may be given."""

_MEGATRONS_OWN: Final = {
    "tensorboard": "Megatron's own --tensorboard-dir",
    "wandb": "Megatron's own --wandb-project",
}


def load_settings(
    source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Settings:
    """Load and check the settings for a user's own script.

    Args:
        source: YAML file, the same as a mapping, or None where overrides say everything.
        overrides: `dotted.key=value`, applied in order.

    Raises:
        ConfigError: Something is wrong. All problems that can be found at once are in it.
    """
    tree, origins, problems = _tree(source)
    for text in overrides:
        problems.extend(apply_override(tree, text, origins))
    sections: dict[str, Any] = {}
    for key, message in _found(tree, sections):
        location, place = origins.place(key)
        problems.append(Problem(location=location, key=place, message=message))
    if problems:
        raise ConfigError(problems)
    return Settings(**sections, origins=origins)


def _tree(
    source: str | Path | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], Origins, list[Problem]]:
    if source is None:
        return {}, Origins(file=COMMAND_LINE), []
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), Origins(file="mapping"), []
    name = str(source)
    parsed = read_yaml(read_text(name), name)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    if not isinstance(parsed.value, dict):
        found = "the file is empty" if parsed.value is None else f"{shown(parsed.value)}"
        allowed = f"allowed: a mapping of the sections {', '.join(DROP_IN_SECTIONS)}"
        raise ConfigError(Problem(location=f"{name}:1", key="", message=f"{found}; {allowed}"))
    return parsed.value, Origins(file=name, lines=parsed.lines), []


def _found(tree: dict[str, Any], sections: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Fill ``sections`` and yield (dotted key, message) for each problem."""
    for key in tree:
        if key in SECTIONS and key not in DROP_IN_SECTIONS:
            yield (
                key,
                "a section of the trainer (megatron_taco.pretrain), not of a script of yours, "
                f"which takes its own flags; allowed: {', '.join(DROP_IN_SECTIONS)}",
            )
        elif key not in DROP_IN_SECTIONS:
            yield key, f"unknown key; {allowed_text(key, list(DROP_IN_SECTIONS))}"
    for name, schema in DROP_IN_SECTIONS.items():
        content = tree.get(name)
        content = {} if content is None else content
        if not isinstance(content, dict):
            allowed = ", ".join(schema.model_fields)
            yield name, f"{shown(content)} is not a section; allowed keys: {allowed}"
            continue
        section, found = validated(schema, content)
        sections[name] = section
        for key, message in found:
            yield f"{name}.{key}" if key else name, message
        if name == "telemetry":
            for key, instead in _MEGATRONS_OWN.items():
                if content.get(key):
                    yield f"telemetry.{key}", f"not for a script of yours; use {instead}"
