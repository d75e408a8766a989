"""Any argument of a parser, by name and value, without knowing it beforehand."""

import argparse
import enum
from typing import Any

import pytest

from megatron_taco.training.megatron_options import (
    OptionError,
    Options,
    _Parser,
    megatron_options,
    options_of,
)


class Colour(enum.Enum):
    red = 1
    green = 2


@pytest.fixture(scope="module")
def options() -> Options:
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--count", type=int)
    parser.add_argument("--rate", "--speed", type=float, dest="rate")
    parser.add_argument("--name")
    parser.add_argument("--mode", choices=["slow", "fast"])
    parser.add_argument("--colour", type=lambda text: Colour[text], choices=list(Colour))
    parser.add_argument("--pair", nargs=2, type=int)
    parser.add_argument("--several", nargs="+", type=int, default=[])
    parser.add_argument("--any", nargs="*")
    parser.add_argument("--safe", type=bool)
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--no-fuse", action="store_false", dest="fuse")
    parser.add_argument("--maybe", action="store_true", default=None)
    parser.add_argument("--round", action="store_true", dest="round", default=None)
    parser.add_argument("--no-round", action="store_false", dest="round")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=True)
    return options_of(parser)


@pytest.mark.parametrize(
    ("name", "value", "tokens"),
    [
        ("count", 3, ["--count=3"]),
        ("count", -3, ["--count=-3"]),
        ("count", 1e6, ["--count=1000000"]),
        ("rate", 1e-5, ["--rate=1e-05"]),
        ("speed", 2, ["--speed=2"]),
        ("name", "--odd name", ["--name=--odd name"]),
        ("name", 7, ["--name=7"]),
        ("mode", "fast", ["--mode=fast"]),
        ("colour", "green", ["--colour=green"]),
        ("pair", [1, -2], ["--pair", "1", "-2"]),
        ("several", 4, ["--several", "4"]),
        ("several", [], []),
        ("any", [], ["--any"]),
        ("any", ["a", 0.5], ["--any", "a", "0.5"]),
        ("safe", True, ["--safe=true"]),
        ("safe", False, ["--safe="]),
        ("flag", True, ["--flag"]),
        ("flag", False, []),
        ("fuse", False, ["--no-fuse"]),
        ("fuse", True, []),
        ("no_fuse", True, ["--no-fuse"]),
        ("no_fuse", False, []),
        ("maybe", True, ["--maybe"]),
        ("maybe", False, []),
        ("round", True, ["--round"]),
        ("round", False, ["--no-round"]),
        ("both", True, []),
        ("both", False, ["--no-both"]),
        ("no_both", True, ["--no-both"]),
        ("count", None, []),
        ("flag", None, []),
    ],
)
def test_tokens(options: Options, name: str, value: Any, tokens: list[str]) -> None:
    assert options.tokens(name, value) == tokens
    options.parser.parse_args(tokens)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", "x", "'x' is not allowed; allowed: a whole number"),
        ("count", 1.5, "1.5 is not allowed; allowed: a whole number"),
        ("count", True, "true is not allowed; allowed: a whole number"),
        ("count", [1], "a list is not allowed; allowed: a whole number"),
        ("rate", "fast", "'fast' is not allowed; allowed: a number"),
        ("name", False, "false is not allowed; allowed: text"),
        ("mode", "fsat", "'fsat' is not allowed; allowed: slow, fast (nearest: fast)"),
        ("colour", "gren", "'gren' is not allowed; allowed: red, green (nearest: green)"),
        ("pair", [1], "[1] is not allowed; allowed: a list of 2 whole numbers"),
        ("several", ["a"], "['a'] is not allowed; allowed: a list of whole numbers"),
        ("flag", 1, "1 is not allowed; allowed: true or false"),
        ("no_fuse", "yes", "'yes' is not allowed; allowed: true or false"),
        ("flga", True, "Megatron has no such argument (nearest: flag)"),
        ("zzzzzzzz", True, "Megatron has no such argument"),
    ],
)
def test_refusals(options: Options, name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        options.tokens(name, value)
    assert str(caught.value) == message


def test_a_switch_with_one_position_says_so() -> None:
    parser = _Parser(add_help=False)
    parser.add_argument("--on", action="store_true", default=True)
    with pytest.raises(OptionError, match="false cannot be said to Megatron, which has only --on"):
        options_of(parser).tokens("on", False)


def test_every_boolean_of_megatron_can_be_turned_and_left_alone() -> None:
    options = megatron_options()
    turned = 0
    for dest, actions in options.by_dest.items():
        if any(action.nargs != 0 for action in actions):
            continue
        default = options.default(dest)
        assert options.tokens(dest, bool(default)) in ([], [actions[-1].option_strings[0]])
        tokens = options.tokens(dest, not default)
        found = getattr(options.parser.parse_args(tokens), dest)
        assert found is (not default), dest
        turned += 1
    assert turned > 250


def test_every_default_of_megatron_is_accepted_as_a_value() -> None:
    options = megatron_options()
    seen = 0
    for dest, actions in options.by_dest.items():
        default = options.default(dest)
        if actions[0].nargs == 0 or default is None or default == []:
            continue
        plain = getattr(default, "name", default)
        plain = (
            [getattr(item, "name", item) for item in plain] if isinstance(plain, list) else plain
        )
        tokens = options.tokens(dest, plain)
        found = getattr(options.parser.parse_args(tokens), dest)
        assert found == default or found == [default], dest
        seen += 1
    assert seen > 150
