"""Source fingerprints of the functions and classes we rely on, computed without importing them.

A fingerprint is the SHA-256 of a definition's syntax tree with comments, blank lines, line breaks
and docstrings left out, so that only code counts. `fingerprints.json` holds the ones seen in each
megatron-core release, `fingerprints_te.json` those of Transformer Engine;
`scripts/update_fingerprints.py` writes them from unpacked wheels.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from megatron_taco.patching.target import MEGATRON, TRANSFORMER_ENGINE

FILES: Final = {MEGATRON: "fingerprints.json", TRANSFORMER_ENGINE: "fingerprints_te.json"}
"""The file that holds a package's fingerprints."""

type Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def normalise(node: ast.AST) -> str:
    """Write a syntax tree as text in which only code counts.

    The form is ours, not `ast.dump`'s: empty fields are left out, so that a field which a newer
    Python adds to its syntax tree changes nothing.

    Args:
        node: Any syntax tree, usually a function or class definition.

    Returns:
        A string that is equal for definitions that differ in comments, layout and docstrings only.
    """
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "ctx" or name == "type_comment":
            continue
        if name == "body" and isinstance(node, _DEFINITIONS):
            value = _without_docstring(value)
        if isinstance(value, list):
            if not value:
                continue
            text = "[" + ",".join(_normalise_value(item) for item in value) + "]"
        elif value is None and not isinstance(node, ast.Constant):
            continue
        else:
            text = _normalise_value(value)
        fields.append(f"{name}={text}")
    return f"{type(node).__name__}({','.join(fields)})"


def _normalise_value(value: object) -> str:
    return normalise(value) if isinstance(value, ast.AST) else repr(value)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


class SourceFile:
    """One parsed Python file, in which dotted names can be looked up."""

    def __init__(self, text: str, name: str = "<source>") -> None:
        """Parse `text`.

        Raises:
            SyntaxError: `text` is not Python; `name` stands in the message.
        """
        self.name = name
        self._tree = ast.parse(text, filename=name)

    @classmethod
    def read(cls, path: Path) -> SourceFile:
        """Parse a file.

        Raises:
            OSError: The file cannot be read.
            SyntaxError: It is not Python.
        """
        return cls(path.read_text(encoding="utf-8"), str(path))

    def find(self, dotted: str) -> list[ast.stmt]:
        """Return every statement that binds `dotted` (`name` or `Class.name`), in file order.

        More than one is found where a name is bound in several branches of an `if` or `try`.
        """
        nodes: list[ast.stmt] = [
            node for node in _statements(self._tree.body) if dotted.split(".")[0] in _bound(node)
        ]
        for part in dotted.split(".")[1:]:
            inner: list[ast.stmt] = []
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    inner += [child for child in _statements(node.body) if part in _bound(child)]
            nodes = inner
        return nodes

    def definition(self, dotted: str) -> Definition | None:
        """Return the `def` or `class` of `dotted`, or None where it is an assignment or import."""
        found = self.find(dotted)
        node = found[-1] if found else None
        return node if isinstance(node, _DEFINITIONS) else None

    def fingerprint(self, dotted: str) -> str | None:
        """Return the SHA-256 (hexadecimal) of what binds `dotted`, or None where nothing does."""
        found = self.find(dotted)
        if not found:
            return None
        text = "\n".join(normalise(node) for node in found)
        return hashlib.sha256(text.encode()).hexdigest()


class SourceFiles:
    """Parses each file once; made anew for each round of checks."""

    def __init__(self) -> None:
        self._by_path: dict[Path, SourceFile] = {}

    def read(self, path: Path) -> SourceFile:
        """Return the parsed file; raises as `SourceFile.read` does."""
        if path not in self._by_path:
            self._by_path[path] = SourceFile.read(path)
        return self._by_path[path]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of one scope: those inside `if`, `try` and `with` belong to it."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handlers = [child for handler in node.handlers for child in handler.body]
            yield from _statements(node.body + handlers + node.orelse + node.finalbody)
        elif isinstance(node, ast.With):
            yield from _statements(node.body)


def _bound(node: ast.stmt) -> set[str]:
    """The names which one statement binds in its scope."""
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        parts = (part for target in node.targets for part in ast.walk(target))
        return {part.id for part in parts if isinstance(part, ast.Name)}
    return set()


@dataclass(frozen=True)
class Known:
    """The fingerprints seen in released versions.

    Attributes:
        versions: The releases that were read, oldest first.
        objects: `module:dotted` -> fingerprint -> versions that had it.
    """

    versions: tuple[str, ...]
    objects: Mapping[str, Mapping[str, tuple[str, ...]]]

    def seen_in(self, module: str, dotted: str, fingerprint: str) -> tuple[str, ...]:
        """Return the versions in which this object had this fingerprint, oldest first."""
        return self.objects.get(f"{module}:{dotted}", {}).get(fingerprint, ())

    def to_json(self) -> str:
        """Return the text of `fingerprints.json`."""
        objects = {
            name: {digest: list(versions) for digest, versions in by_digest.items()}
            for name, by_digest in sorted(self.objects.items())
        }
        return json.dumps({"versions": list(self.versions), "objects": objects}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Known:
        """Read the text of `fingerprints.json`."""
        data = json.loads(text)
        objects = {
            name: {digest: tuple(versions) for digest, versions in by_digest.items()}
            for name, by_digest in data["objects"].items()
        }
        return cls(tuple(data["versions"]), objects)


@functools.cache
def known(package: str = MEGATRON) -> Known:
    """Return the fingerprints that this package was released with.

    Args:
        package: Whose; a key of `FILES`.
    """
    text = resources.files(__package__).joinpath(FILES[package]).read_text(encoding="utf-8")
    return Known.from_json(text)
