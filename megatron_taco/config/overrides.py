"""Overrides from the command line: `dotted.key=value`, the value read like a YAML value."""

from typing import Any

from megatron_taco.config.errors import Problem
from megatron_taco.config.source import COMMAND_LINE, Origins
from megatron_taco.config.yaml_source import read_yaml


def _problem(text: str, message: str) -> Problem:
    return Problem(location=COMMAND_LINE, key=text, message=message)


def _leaves(prefix: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [prefix]
    return [key for name, item in value.items() for key in _leaves(f"{prefix}.{name}", item)]


def apply_override(tree: dict[str, Any], text: str, origins: Origins) -> list[Problem]:
    """Set one key of a configuration tree.

    Args:
        tree: The mapping read from the file; changed in place.
        text: `dotted.key=value`. Of several overrides of one key the last one counts.
        origins: Told where the key's value now comes from.

    Returns:
        What is wrong with the override's form (its key and value are checked with the rest).
    """
    dotted, equals, raw = text.partition("=")
    parts = dotted.split(".")
    if not equals:
        return [_problem(text, "no '='; write overrides as key=value, for example run.name=test")]
    if not all(part and part == part.strip() for part in parts):
        return [_problem(text, "the key must be names joined by dots, for example run.name=test")]
    parsed = read_yaml(raw, COMMAND_LINE)
    if parsed.problems:
        return [_problem(text, problem.message) for problem in parsed.problems]
    node = tree
    for depth, part in enumerate(parts[:-1], start=1):
        below = node.get(part)
        if below is None:
            below = node[part] = {}
        if not isinstance(below, dict):
            above = ".".join(parts[:depth])
            return [_problem(text, f"{above} is {below!r} ({origins.where(above)}), not a section")]
        node = below
    node[parts[-1]] = parsed.value
    for key in [key for key in origins.overrides if key.startswith(dotted + ".")]:
        del origins.overrides[key]
    for key in [key for key in origins.lines if key.startswith(dotted + ".")]:
        del origins.lines[key]
    origins.overrides[dotted] = text
    for key in _leaves(dotted, parsed.value):
        origins.overrides[key] = text
    return []
