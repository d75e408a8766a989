"""What a configuration mistake looks like to the user.

One mistake is one line, `location: dotted.key: what is wrong; what is allowed (nearest: name)`,
and every mistake that can be found is reported in one go.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake.

    Attributes:
        location: `file:line`, or `command line` for an override.
        key: Dotted key; for an override the whole `key=value`; empty if it is about the file.
        message: What was found and what is allowed.
    """

    location: str
    key: str
    message: str

    def __str__(self) -> str:
        """Return the one line shown to the user."""
        return ": ".join(part for part in (self.location, self.key, self.message) if part)


def _reading_order(problem: Problem | str) -> tuple[bool, int]:
    """Sort by line of the file, then what has no line, in the order it was found."""
    line = problem.location.rpartition(":")[2] if isinstance(problem, Problem) else ""
    return not line.isdigit(), int(line) if line.isdigit() else 0


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Its text is the full message, one line per problem in the order of the file. Entry points write
    it to stderr and exit with code 2, without a traceback.
    """

    def __init__(self, problems: Problem | str | Iterable[Problem | str]) -> None:
        """Make the error from one or several problems (or ready-made lines)."""
        if isinstance(problems, Problem | str):
            problems = (problems,)
        self.problems = tuple(sorted(problems, key=_reading_order))
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem | str, ...]]]:
        """Keep the problems when the error is sent to another process."""
        return type(self), (self.problems,)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the member of `allowed` most like `name`, or None if none is close.

    Case and the choice of hyphen or underscore do not count as differences.
    """
    by_plain = {_plain(candidate): candidate for candidate in allowed}
    found = difflib.get_close_matches(_plain(name), list(by_plain), n=1, cutoff=0.6)
    return by_plain[found[0]] if found else None


def allowed_text(found: str, allowed: Sequence[str], *, list_at_most: int = 40) -> str:
    """Return `allowed: a, b, c (nearest: b)`, without the list where it would be too long."""
    close = nearest(found, allowed)
    hint = f"nearest: {close}" if close is not None else ""
    if len(allowed) > list_at_most:
        return hint
    listing = f"allowed: {', '.join(allowed)}"
    return f"{listing} ({hint})" if hint else listing
