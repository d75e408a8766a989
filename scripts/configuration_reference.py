#!/usr/bin/env python3
"""Write docs/configuration.md from the schema, or check that it is up to date.

python scripts/configuration_reference.py [--check]
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from megatron_taco.config.config import SECTIONS
from megatron_taco.config.drop_in import DROP_IN_SECTIONS
from megatron_taco.config.section import Section

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """\
<!-- Written by scripts/configuration_reference.py; do not edit. -->
# Configuration

One YAML file, checked strictly: an unknown, repeated or contradictory key is one line with file, \
line, key, what was found and what is allowed. YAML is read by the 1.2 core schema: `on` and `off` \
are words, only `true` and `false` are booleans. Sizes are whole bytes or `256KiB`, `1MiB`, ...

The trainer (`megatron_taco.pretrain`) takes all six sections, and overrides as `key=value`. A \
script of yours (`megatron_taco.launch`, `megatron_taco.install`) takes {drop_in} alone, and \
`--key value`.
"""
MEGATRON = """\

## megatron

Any Megatron-LM argument by its own name (`tensor_model_parallel_size`, `lr`, `train_iters`, ...), \
as Megatron's own parser knows it; `--no-x` is `x: false`. What the other sections decide is \
refused here, with the key to use.
"""
UNSAID = {
    "model": "Megatron's argument of this name.",
    "compression.data_parallel.weights": "As for gradients.",
}
"""What stands for keys which a section's docstring does not describe, by section."""


def rows(section: type[Section], prefix: str) -> list[str]:
    """One table row for each key of a section and of the sections in it."""
    said = descriptions(section)
    found = []
    for name, field in section.model_fields.items():
        key = f"{prefix}.{name}"
        below = section_in(field.annotation)
        if below is not None and name not in said:
            found += rows(below, key)
            continue
        if below is not None:
            found.append(f"| `{key}` | a section | | {said[name]} |")
            found += rows(below, key)
            continue
        found.append(
            f"| `{key}` | {kind(field)} | {default(field)} | {said.get(name) or UNSAID[prefix]} |"
        )
    return found


def section_in(annotation: Any) -> type[Section] | None:
    """The section class that a key holds, or None."""
    parts = get_args(annotation) or (annotation,)
    return next((p for p in parts if inspect.isclass(p) and issubclass(p, Section)), None)


def descriptions(section: type[Section]) -> dict[str, str]:
    """What the `Attributes:` of a section's docstring say, by key."""
    text = inspect.getdoc(section) or ""
    _, _, attributes = text.partition("Attributes:\n")
    found: dict[str, str] = {}
    name = None
    for line in attributes.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif name and line.startswith("        "):
            found[name] += " " + line.strip()
        elif line.strip():
            break
    return {key: value.replace("|", "\\|") for key, value in found.items()}


def kind(field: Any) -> str:
    """The values that a key takes."""
    annotation = field.annotation
    choices = [
        str(choice)
        for part in (annotation, *get_args(annotation))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    if choices:
        return ", ".join(f"`{choice}`" for choice in dict.fromkeys(choices))
    plain = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    parts = [p for p in (get_args(annotation) or (annotation,)) if p is not type(None)]
    names = [plain.get(get_origin(p) or p, "") for p in parts]
    if get_origin(annotation) in (tuple, list) or not all(names):
        return "as described"
    return " or ".join(dict.fromkeys(names)) + bounds(field)


def bounds(field: Any) -> str:
    """The range of a number, as its constraints have it."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{text} {getattr(constraint, name)}"
        for name, text in words.items()
        for constraint in field.metadata
        if getattr(constraint, name, None) is not None
    ]
    return ", " + ", ".join(found) if found else ""


def default(field: Any) -> str:
    """A key's default, as YAML writes it."""
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined or value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value and value % 2**20 == 0:
        return f"`{value // 2**20}MiB`"
    return f"`{value}`"


def document() -> str:
    """The whole reference."""
    drop_in = " and ".join(f"`{name}`" for name in DROP_IN_SECTIONS)
    text = HEAD.format(drop_in=drop_in)
    for name, section in SECTIONS.items():
        if section is None:
            text += MEGATRON
            continue
        summary = (inspect.getdoc(section) or "").partition("\n")[0]
        text += f"\n## {name}\n\n{summary}\n\n| key | values | default | |\n|---|---|---|---|\n"
        text += "\n".join(rows(section, name)) + "\n"
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    args = parser.parse_args(argv)
    text = document()
    if not args.check:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET} is out of date; run scripts/configuration_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
