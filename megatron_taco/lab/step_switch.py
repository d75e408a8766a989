"""One place in Megatron, several replacements, of which one is in force at a time.

Hooks claim targets of the registry, one owner each. The benchmark records what the hooks of each
arm would claim, claims every target once itself, and passes each call to the arm whose turn it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from megatron_taco.lab.step_schedule import PLAIN
from megatron_taco.patching.registry import Hit, Registry, Replacement
from megatron_taco.patching.target import Target

OWNER = "bench step"
Replacements = dict[str, Replacement]
"""Target's name -> replacement."""


class Recorder(Registry):
    """A registry that is never applied: it only notes the claims."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Replacements = {}

    def claim(self, target: Target | str, owner: str, replacement: Replacement) -> None:
        """Note a claim by its target's name."""
        self.found[target if isinstance(target, str) else target.name] = replacement


def recorded(claim: Callable[[Registry], None]) -> Replacements:
    """Returns what some hooks claim.

    Args:
        claim: Their method.
    """
    recorder = Recorder()
    claim(recorder)
    return recorder.found


class Delegate:
    """An object whose attributes are always those of another, asked for anew each time."""

    def __init__(self, current: Callable[[], Any]) -> None:
        self.__dict__["_current"] = current

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_current"](), name)


class Switch:
    """Claims the targets of all arms.

    Args:
        arms: The replacements of each arm. What an arm does not replace is Megatron's own while it
            has its turn.

    Attributes:
        arm: The arm whose turn it is.
    """

    def __init__(self, arms: Mapping[str, Replacements]) -> None:
        self._arms = dict(arms)
        self.arm = PLAIN

    def claim(self, registry: Registry) -> None:
        """Claim every target once."""
        for target in dict.fromkeys(name for found in self._arms.values() for name in found):
            registry.claim(target, OWNER, functools.partial(self._replace, target))

    def _replace(self, target: str, original: Any, hit: Hit) -> Any:
        made = {
            arm: found[target](original, hit)
            for arm, found in self._arms.items()
            if target in found
        }
        if isinstance(original, ModuleType):
            return Delegate(lambda: made.get(self.arm, original))

        @functools.wraps(original)
        def switched(*args: Any, **kwargs: Any) -> Any:
            return made.get(self.arm, original)(*args, **kwargs)

        return switched
