"""Turns what Megatron's own checks raise into a message that names the user's keys."""

import ast
import re
import traceback
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Final

FAILURES: Final = (
    AssertionError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    ImportError,
    NotImplementedError,
    SystemExit,
)
"""What Megatron's checks of the arguments raise (`exit()` is among them)."""

_FLAG: Final = re.compile(r"--([a-z0-9][a-z0-9_-]*)")
_WORD: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")


def explain(
    error: BaseException, keys: Mapping[str, str], known: Container[str]
) -> tuple[str | None, str]:
    """Return (key, message) for an exception raised by one of Megatron's checks.

    Args:
        error: The exception, with its traceback.
        keys: The user's dotted key by Megatron's name of the argument, for those that are set.
        known: Names of all of Megatron's arguments.

    Returns:
        The first of the user's keys that the check speaks of (None if it speaks of none), and
        Megatron's own message, or the condition itself where Megatron gives no message.
    """
    statement, condition = _where(error)
    text = "" if isinstance(error, SystemExit) else " ".join(str(error).split())
    named = list(
        dict.fromkeys(
            [
                *_names_in_text(text, keys),
                *_names_in_code(statement),
                *_names_in_code(condition),
            ]
        )
    )
    given = list(dict.fromkeys(keys[name] for name in named if name in keys))
    others = given[1:] or [f"megatron.{name}" for name in named if name in known][: not given]
    mentioned = f" (see also {', '.join(others)})" if others else ""
    message = f"Megatron refuses it: {_message(error, text, statement, condition)}{mentioned}"
    return (given[0] if given else None), message


def _message(
    error: BaseException, text: str, statement: ast.stmt | None, condition: ast.expr | None
) -> str:
    if isinstance(error, KeyError):
        return f"{text} is not one of the allowed names"
    if text:
        return text
    if isinstance(statement, ast.Assert):
        return f"the condition `{ast.unparse(statement.test)}` does not hold"
    if condition is not None:
        return f"it stops where `{ast.unparse(condition)}`"
    return f"{type(error).__name__} while checking the arguments"


def _names_in_text(text: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield names that a message spells as a flag, as a name, or in words."""
    for match in _FLAG.finditer(text):
        yield match.group(1).rstrip("-_").replace("-", "_")
    for match in _WORD.finditer(text):
        yield match.group(0)
    words = text.lower().replace("-", " ").replace("_", " ")
    for name in keys:
        if "_" in name and name.replace("_", " ") in words:
            yield name


def _names_in_code(tree: ast.AST | None) -> Iterator[str]:
    """Yield NAME for every `args.NAME` (`self.NAME` in a configuration class)."""
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in ("args", "self"):
            yield node.attr


def _where(error: BaseException) -> tuple[ast.stmt | None, ast.expr | None]:
    """Return the statement of Megatron's source that raised, and the `if` it stands under.

    Each is None if it cannot be found.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/megatron/" in Path(frame.filename).as_posix() and frame.lineno is not None
    ]
    if not frames or not Path(frames[-1].filename).is_file():
        return None, None
    line = frames[-1].lineno or 0
    tree = ast.parse(Path(frames[-1].filename).read_text(encoding="utf-8"))
    around = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _holds(node, line)),
        key=lambda node: (node.end_lineno or node.lineno) - node.lineno,
    )
    condition = next((node.test for node in around[1:] if isinstance(node, ast.If)), None)
    return (around[0] if around else None), condition


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
