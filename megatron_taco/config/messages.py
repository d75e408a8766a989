"""Turns what pydantic finds into one sentence: what was found, what is allowed, what is nearest."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from megatron_taco.config.errors import allowed_text
from megatron_taco.config.section import Section

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
}
_RANGES = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_BOOLEANS = {"on": "true", "yes": "true", "off": "false", "no": "false"}


def shown(value: object) -> str:
    """Return a value as a message shows it: as YAML writes it, text in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    return repr(value)


def _inner(annotation: Any) -> list[Any]:
    """Return the types an annotation allows, without None and metadata."""
    if get_origin(annotation) is Annotated:
        return _inner(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for arg in get_args(annotation) for part in _inner(arg)]
    return [] if annotation is type(None) else [annotation]


def _choices(annotation: Any) -> list[str]:
    return [
        str(choice)
        for part in _inner(annotation)
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]


def _section_at(root: type[Section], path: tuple[str | int, ...]) -> type[Section]:
    for name in path:
        for part in _inner(root.model_fields[str(name)].annotation):
            if isinstance(part, type) and issubclass(part, Section):
                root = part
    return root


def explain(root: type[Section], error: ErrorDetails) -> str:
    """Return the message for one of pydantic's errors.

    Args:
        root: The section that was validated.
        error: An element of `ValidationError.errors()`.
    """
    kind, path, found = error["type"], error["loc"], error["input"]
    parent = _section_at(root, path[:-1]) if path else root
    name = str(path[-1]) if path else ""
    fields = list(parent.model_fields)
    if kind == "extra_forbidden":
        return f"unknown key; {allowed_text(name, fields)}"
    if kind == "missing":
        return "required"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        section = _section_at(root, path)
        keys = ", ".join(section.model_fields)
        return f"{shown(found)} is not a section; allowed: a mapping with the keys {keys}"
    if kind == "literal_error":
        choices = _choices(parent.model_fields[name].annotation)
        if isinstance(found, bool) and {"on", "off"} <= set(choices):
            nearest = "on" if found else "off"
            return (
                f"{shown(found)} is not allowed; allowed: {', '.join(choices)} (nearest: {nearest})"
            )
        return f"{shown(found)} is not allowed; {allowed_text(str(found), choices)}"
    if kind in _RANGES:
        bound, words = _RANGES[kind]
        return f"{shown(found)} is out of range; allowed: {words} {error['ctx'][bound]}"
    if kind in _KINDS:
        hint = ""
        if kind.startswith("bool") and isinstance(found, str) and found.lower() in _BOOLEANS:
            hint = f" (nearest: {_BOOLEANS[found.lower()]})"
        if kind == "string_type" and isinstance(found, int | float):
            hint = f" (nearest: '{shown(found)}', in quotes)"
        return f"{shown(found)} is not allowed; allowed: {_KINDS[kind]}{hint}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    return f"{shown(found)} is not allowed: {error['msg']}"
