"""From (name, value) to Megatron's command line, for any argument of Megatron's own parser.

Nothing here knows a single argument: names, types, choices and the ways to say yes and no are read
from the parser that the installed Megatron builds.
"""

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Never

from megatron_taco.config.errors import allowed_text
from megatron_taco.config.messages import shown

_KINDS: Final[dict[Any, tuple[str, str]]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
}


class OptionError(ValueError):
    """An argument that Megatron does not have, or a value that it does not take."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage and leaving the process."""

    def error(self, message: str) -> Never:
        raise OptionError(message)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a parser, by every name they have.

    Attributes:
        parser: The parser.
        by_dest: Actions by the attribute that they set.
        by_flag: (action, flag) by the flag's name with underscores.
    """

    parser: argparse.ArgumentParser
    by_dest: dict[str, list[argparse.Action]] = field(default_factory=dict)
    by_flag: dict[str, tuple[argparse.Action, str]] = field(default_factory=dict)

    def dest(self, name: str) -> str | None:
        """Return the attribute that `name` sets, or None if there is no such argument."""
        if name in self.by_dest:
            return name
        found = self.by_flag.get(name)
        return found[0].dest if found else None

    def __contains__(self, name: object) -> bool:
        """Return whether there is an argument of this name."""
        return name in self.by_dest or name in self.by_flag

    def default(self, dest: str) -> Any:
        """Return the value of an attribute of which the command line says nothing."""
        return self.by_dest[dest][0].default  # of two switches of one attribute the first decides

    def tokens(self, name: str, value: Any) -> list[str]:
        """Return the command line for one argument.

        Args:
            name: An attribute's name (`masked_softmax_fusion`), which takes the attribute's value,
                or a flag's (`no_masked_softmax_fusion`), which takes true for "given".
            value: A scalar, a list of scalars, or None for "not given".

        Raises:
            OptionError: There is no such argument, or it does not take the value. The message
                says what is allowed.
        """
        if name not in self:
            names = sorted(self.by_dest.keys() | self.by_flag.keys())
            hint = allowed_text(name, names, list_at_most=0)
            raise OptionError("Megatron has no such argument" + (f" ({hint})" if hint else ""))
        if value is None:
            return []
        if name in self.by_dest:
            actions = self.by_dest[name]
            if any(action.nargs == 0 for action in actions):
                return self._switch(name, value)
            action, flag = actions[0], actions[0].option_strings[0]
        else:
            action, flag = self.by_flag[name]
            if action.nargs == 0:
                return [flag] if _boolean(value) else []
        tokens = _value_tokens(action, flag, value)
        self._check(action, tokens, value)
        return tokens

    def _switch(self, dest: str, value: Any) -> list[str]:
        """Return the flag that makes a boolean attribute `value`, if it is not so already."""
        wanted, default = _boolean(value), self.default(dest)
        if wanted == default and default is not None:
            return []
        for action in self.by_dest[dest]:
            if isinstance(action, argparse.BooleanOptionalAction):
                negative = [f for f in action.option_strings if f.startswith("--no-")]
                positive = [f for f in action.option_strings if not f.startswith("--no-")]
                return positive[:1] if wanted else negative[:1]
            if action.const is wanted:
                return [action.option_strings[0]]
        if default is None and not wanted:
            return []
        raise OptionError(
            f"{shown(wanted)} cannot be said to Megatron, which has only "
            f"{self.by_dest[dest][0].option_strings[0]}; leave the key out"
        )

    def _check(self, action: argparse.Action, tokens: list[str], value: Any) -> None:
        """Let the parser itself judge the value."""
        try:
            self.parser.parse_known_args(tokens)
        except (OptionError, KeyError, ValueError, TypeError, AssertionError) as error:
            # A KeyError comes from the type functions of Megatron's enumerations, an
            # AssertionError from those of its patterns: argparse lets both through.
            raise OptionError(_refusal(action, value, error)) from None


def megatron_options() -> Options:
    """Read the parser of the installed Megatron (imports it, which takes some seconds)."""
    from megatron.training.arguments import add_megatron_arguments

    with contextlib.redirect_stdout(io.StringIO()):  # it warns about its own annotations
        parser = add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False))
    return options_of(parser)


def options_of(parser: argparse.ArgumentParser) -> Options:
    """Return the arguments of a parser by their names."""
    options = Options(parser=parser)
    for action in parser._actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            continue
        options.by_dest.setdefault(action.dest, []).append(action)
        for flag in action.option_strings:
            options.by_flag[flag.lstrip("-").replace("-", "_")] = (action, flag)
    return options


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{shown(value)} is not allowed; allowed: true or false")
    return value


def _text(action: argparse.Action, value: Any) -> str:
    """Return one value as the command line holds it."""
    if isinstance(value, bool):
        if action.type is bool:  # argparse calls bool() on the text: only empty text is false
            return "true" if value else ""
        raise OptionError(_refusal(action, value, None))
    if isinstance(value, float) and action.type is int and value.is_integer():
        return str(int(value))  # 1e6 is a whole number
    return str(value)


def _value_tokens(action: argparse.Action, flag: str, value: Any) -> list[str]:
    takes_list = action.nargs is not None
    if not takes_list:
        if isinstance(value, list):
            raise OptionError(f"a list is not allowed; {_allowed(action)}")
        return [f"{flag}={_text(action, value)}"]
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    if not values and action.nargs == "+":
        if action.default == []:
            return []
        raise OptionError("an empty list is not allowed; leave the key out")
    return [flag, *(_text(action, item) for item in values)]


def _choices(action: argparse.Action) -> list[str]:
    return [str(getattr(choice, "name", choice)) for choice in action.choices or ()]


def _allowed(action: argparse.Action) -> str:
    names = ", ".join(_choices(action))
    one, several = _KINDS.get(action.type, ("text", "texts"))
    if action.nargs is None:
        return f"allowed: {names or one}"
    count = f"{action.nargs} " if isinstance(action.nargs, int) else ""
    return f"allowed: a list of {count}{names or several}"


def _refusal(action: argparse.Action, value: Any, error: Exception | None) -> str:
    choices = _choices(action)
    if choices and isinstance(value, str):
        return f"{shown(value)} is not allowed; {allowed_text(value, choices)}"
    own_type = action.type is not None and action.type not in (*_KINDS, str)
    if own_type and not choices and error is not None:
        return f"{shown(value)} is not allowed by {action.option_strings[0]}"
    return f"{shown(value)} is not allowed; {_allowed(action)}"
