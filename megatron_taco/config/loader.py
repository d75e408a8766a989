"""Reads a configuration file and overrides into a `Config`, or reports everything wrong with it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_taco.config.combinations import combination_problems
from megatron_taco.config.config import SECTIONS, Config
from megatron_taco.config.errors import ConfigError, Problem, allowed_text
from megatron_taco.config.megatron_section import megatron_problems
from megatron_taco.config.messages import explain, shown
from megatron_taco.config.overrides import apply_override
from megatron_taco.config.presets import PRESETS
from megatron_taco.config.section import Section
from megatron_taco.config.source import Origins
from megatron_taco.config.yaml_source import read_yaml


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load, resolve and check a configuration.

    Args:
        path: YAML file.
        overrides: `dotted.key=value`, applied in order; the values are read like YAML values.

    Raises:
        ConfigError: Something is wrong. All problems that can be found at once are in it.
    """
    name = str(path)
    parsed = read_yaml(read_text(name), name)
    origins = Origins(file=name, lines=parsed.lines)
    problems = list(parsed.problems)
    tree = parsed.value
    if not isinstance(tree, dict):
        if not problems:
            what = "the file is empty" if tree is None else f"{shown(tree)} is not a mapping"
            sections = f"allowed: a mapping of the sections {', '.join(SECTIONS)}"
            problems.append(Problem(location=f"{name}:1", key="", message=f"{what}; {sections}"))
        raise ConfigError(problems)
    for text in overrides:
        problems.extend(apply_override(tree, text, origins))
    return _build(tree, origins, problems, parsed.unreadable)


def read_text(name: str) -> str:
    """Read a configuration file; raises `ConfigError` with the reason where it cannot be."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
    except FileNotFoundError:
        folder = Path(name).parent
        names = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        hint = allowed_text(Path(name).name, names, list_at_most=0)
        message = "no such file" + (f" ({hint})" if hint else "")
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    raise ConfigError(Problem(location=name, key="", message=message))


def _build(
    tree: dict[str, Any], origins: Origins, problems: list[Problem], unreadable: set[str]
) -> Config:
    def report(dotted: str, message: str) -> None:
        if any(key == dotted or key.startswith(dotted + ".") for key in unreadable):
            return  # already reported, and what stands there now is not what the user wrote
        location, key = origins.place(dotted)
        problems.append(Problem(location=location, key=key, message=message))

    for unknown in [key for key in tree if key not in SECTIONS]:
        report(unknown, f"unknown key; {allowed_text(unknown, list(SECTIONS))}")
    sections: dict[str, Any] = {}
    for name, schema in SECTIONS.items():
        content = tree.get(name)
        content = {} if content is None else content
        if not isinstance(content, dict):
            allowed = ", ".join(schema.model_fields) if schema else "Megatron's arguments"
            report(name, f"{shown(content)} is not a section; allowed keys: {allowed}")
            continue
        if name == "model":
            content, origins = _with_preset(content, origins, report)
        if schema is None:
            found = list(megatron_problems(content))
            sections[name] = content
        else:
            section, found = validated(schema, content)
            if section is not None:
                sections[name] = section
        for key, message in found:
            report(f"{name}.{key}" if key else name, message)
    for key, message in _across(sections):
        report(key, message)
    if problems:
        raise ConfigError(problems)
    return Config(**sections, origins=origins)


def _with_preset(
    model: dict[str, Any], origins: Origins, report: Callable[[str, str], None]
) -> tuple[dict[str, Any], Origins]:
    """Return the model section with the preset's keys under the explicit ones."""
    preset = model.get("preset")
    if not isinstance(preset, str):
        return model, origins
    if preset not in PRESETS:
        report("model.preset", f"{preset!r} is no preset; {allowed_text(preset, list(PRESETS))}")
        return {**_placeholder(), **model, "preset": None}, origins
    table = PRESETS[preset]
    keys = frozenset(f"model.{key}" for key in table if key not in model)
    resolved = Origins(
        file=origins.file,
        lines=origins.lines,
        overrides=origins.overrides,
        preset=preset,
        preset_keys=keys,
    )
    return {**table, **model}, resolved


def _placeholder() -> dict[str, Any]:
    """Return sizes that keep an unknown preset from also being reported as missing sizes."""
    return dict(next(iter(PRESETS.values())))


def validated(
    schema: type[Section], content: dict[str, Any]
) -> tuple[Section | None, list[tuple[str, str]]]:
    """Return a section, or None where a value does not fit, and (key, message) of each problem."""
    content = _without_empty_sections(schema, content)
    try:
        section = schema.model_validate(content)
    except ValidationError as error:
        found = [
            (".".join(map(str, item["loc"])), explain(schema, item)) for item in error.errors()
        ]
        return None, found
    return section, list(_contradictions(section))


def _without_empty_sections(schema: type[Section], content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without sub-sections that are written but empty (`key:`)."""
    return {
        name: value
        for name, value in content.items()
        if value is not None or not _is_section(schema, name)
    }


def _is_section(schema: type[Section], name: str) -> bool:
    field = schema.model_fields.get(name)
    annotation = field.annotation if field else None
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _contradictions(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, message in section.contradictions():
        yield f"{prefix}{key}" if key else prefix.rstrip("."), message
    for name in type(section).model_fields:
        below = getattr(section, name)
        if isinstance(below, Section):
            yield from _contradictions(below, f"{prefix}{name}.")


def _across(sections: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield contradictions between sections."""
    data, model = sections.get("data"), sections.get("model")
    if data is not None and model is not None:
        ids, rows = data.tokenizer.vocab_size, model.vocab_size
        if ids is not None and rows is not None and rows < ids:
            yield (
                "model.vocab_size",
                f"{rows} rows are too few for the {ids} ids of data.tokenizer "
                f"({data.tokenizer.kind}); allowed: at least {ids}",
            )
    if model is not None and "megatron" in sections:
        yield from combination_problems(model, sections["megatron"])
