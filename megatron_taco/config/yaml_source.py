"""YAML 1.2 core-schema reader that remembers lines and refuses what YAML lets pass silently.

PyYAML by itself follows YAML 1.1, where `off` is a boolean, `1e-3` is a string and `010` is 8, and
it keeps the last of two equal keys. Here scalars follow the YAML 1.2 core schema (only
true / false are booleans), and a repeated key, a tag, or an alias inside itself is a problem.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from megatron_taco.config.errors import Problem

_INT: Final = re.compile(r"[-+]?[0-9]+\Z")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]+\Z|0o[0-7]+\Z")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL: Final = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_NULLS: Final = frozenset(("", "~", "null", "Null", "NULL"))
_TRUE: Final = frozenset(("true", "True", "TRUE"))
_FALSE: Final = frozenset(("false", "False", "FALSE"))
_PLAIN_TAGS: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
_MAX_NODES: Final = 100_000


@dataclass(kw_only=True)
class Parsed:
    """The plain content of a YAML text.

    Attributes:
        value: Mappings, lists and scalars; None if there was no content.
        lines: One-based line of each dotted key.
        problems: What was wrong; `value` then holds what could be read.
        unreadable: Dotted keys whose value could not be read; it is None instead.
    """

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


class _Loader(yaml.SafeLoader):
    """SafeLoader with no implicit types: every plain scalar arrives as written."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute)


def plain_scalar(text: str) -> Any:
    """Return the value of a plain scalar under the YAML 1.2 core schema."""
    if text in _NULLS:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.match(text):
        return int(text)
    if _HEX.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL.match(text):
        return float(text.replace(".", "", 1))
    return text


class _Reader:
    def __init__(self, name: str) -> None:
        self.parsed = Parsed()
        self.name = name
        self._open: list[yaml.Node] = []
        self._nodes = 0

    def problem(self, mark: yaml.Mark | None, key: str, message: str) -> None:
        place = self.name if mark is None else f"{self.name}:{mark.line + 1}"
        self.parsed.problems.append(Problem(location=place, key=key, message=message))

    def unreadable(self, node: yaml.Node, key: str, message: str) -> None:
        self.parsed.unreadable.add(key)
        self.problem(node.start_mark, key, message)

    def read(self, node: yaml.Node, key: str) -> Any:
        self._nodes += 1
        if any(node is parent for parent in self._open):
            self.unreadable(node, key, "an alias (*name) stands inside its own anchor")
            return None
        if self._nodes > _MAX_NODES:
            if self._nodes == _MAX_NODES + 1:
                self.unreadable(node, key, f"more than {_MAX_NODES} values; too many")
            return None
        self._open.append(node)
        try:
            return self._content(node, key)
        finally:
            self._open.pop()

    def _content(self, node: yaml.Node, key: str) -> Any:
        if node.tag not in _PLAIN_TAGS:
            self.unreadable(node, key, f"the tag {node.tag!r} is not allowed; remove it")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, f"{key}.{i}") for i, child in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode):
            raise TypeError(f"unexpected YAML node {node!r}")
        value = plain_scalar(node.value) if node.style is None else node.value
        if isinstance(value, float) and not math.isfinite(value):
            self.unreadable(node, key, f"{node.value} is not a finite number")
            return None
        return value

    def _mapping(self, node: yaml.MappingNode, prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(name, str) or not name:
                self.problem(key_node.start_mark, prefix, "a key must be a plain name")
                continue
            dotted = f"{prefix}.{name}" if prefix else name
            if name == "<<":
                self.problem(key_node.start_mark, dotted, "merge keys (<<) are not allowed")
                continue
            if "." in name:
                self.problem(
                    key_node.start_mark,
                    dotted,
                    f"the key {name!r} holds a dot; nest it instead: "
                    f"{name.replace('.', ': {', 1)}: ...}}",
                )
                continue
            if name in first:
                self.problem(
                    key_node.start_mark,
                    dotted,
                    f"duplicated key, first given on line {first[name]}; keep one of them",
                )
                continue
            first[name] = key_node.start_mark.line + 1
            self.parsed.lines.setdefault(dotted, first[name])
            result[name] = self.read(value_node, dotted)
        return result


def read_yaml(text: str, name: str) -> Parsed:
    """Read one YAML document.

    Args:
        text: The document.
        name: What to call it in messages, usually the file's path.

    Returns:
        Its content, the line of every key, and every problem found. A syntax error ends the
        reading and is the only problem then.
    """
    reader = _Reader(name)
    try:
        nodes = list(yaml.compose_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        reader.problem(mark, "", f"YAML syntax error: {what or error}")
        return reader.parsed
    except (yaml.YAMLError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        reader.problem(None, "", f"YAML syntax error: {' '.join(what.split())}")
        return reader.parsed
    if len(nodes) > 1:
        reader.problem(nodes[1].start_mark, "", "a second YAML document; only one is allowed")
        return reader.parsed
    if nodes and nodes[0] is not None:
        reader.parsed.value = reader.read(nodes[0], "")
    return reader.parsed
