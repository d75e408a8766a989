"""The registry of replacements inside Megatron and Transformer Engine: claim, check, apply, undo.

Use::

    registry.claim("tensor.row_forward", owner="tensor parallel", replacement=wrap)
    with registry.apply():
        ...                       # or keep the returned object and call undo() on it

`replacement(original, hit)` builds the new object once, at apply time; it calls `hit()` whenever
the replaced thing runs, so that a patch which never runs can fail the run. Nothing is changed
before every check of every claim has passed.

An attribute whose object is *defined* in the target's module (`__module__`) is also rebound where
other loaded modules imported it by value. An alias there (`torch`, `dist_all_gather_func`) is
someone else's object which others use for other things: only that module's name is rebound.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any, Self

from megatron_taco.patching import checks, errors, targets
from megatron_taco.patching.attributes import MISSING, Slot
from megatron_taco.patching.fingerprints import Known, SourceFiles, known
from megatron_taco.patching.inspection import package_root, package_version
from megatron_taco.patching.targets import Target

Hit = Callable[[], None]
Replacement = Callable[[Any, Hit], Any]
"""`replacement(original, hit)` returns the function, class or proxy to put in place."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """One owner's wish to replace one target."""

    target: Target
    owner: str
    replacement: Replacement


@dataclass
class _Change:
    """One replacement in place: where, what was there, what is there now."""

    claim: Claim
    slot: Slot
    new: Any
    importers: list[tuple[ModuleType, str]] = field(default_factory=list)


class Applied:
    """A set of replacements that is in place; `undo()` or the end of a `with` takes it back."""

    def __init__(self, registry: Registry, changes: list[_Change]) -> None:
        """Called by `Registry.apply` alone."""
        self._registry = registry
        self._changes = changes

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets in place, in the order in which they were replaced."""
        return tuple(change.claim.target for change in self._changes)

    def undo(self) -> None:
        """Put the very same objects back everywhere, last replaced first; then do nothing more.

        Modules that imported a replacement by value after `apply` get the original as well.

        Raises:
            UndoError: Someone else has replaced ours meanwhile: theirs is left, all else is
                restored.
        """
        changes, self._changes = self._changes, []
        left = [text for change in reversed(changes) for text in self._restore(change)]
        if left:
            raise errors.UndoError(
                "replaced by someone else after us, left as it is: " + "; ".join(left)
            )

    def _restore(self, change: _Change) -> list[str]:
        target, slot = change.claim.target, change.slot
        left = []
        found = slot.current()
        if found is change.new:
            slot.write(slot.raw)
        elif found is not slot.raw:
            text = "nothing" if found is MISSING else checks.describe(found)
            left.append(f"{target.name} ({target.path}) is now {text}")
        if isinstance(slot.holder, ModuleType):
            for module, name in _holders(change.new, target):
                setattr(module, name, slot.raw)
        self._registry._forget(change.claim)
        _log.info("restored %s (%s)", target.path, target.name)
        return left

    def __enter__(self) -> Self:
        """Return self; everything is in place already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo, whether or not the block raised."""
        self.undo()


class Registry:
    """Collects claims on targets and applies them all or not at all.

    Not thread-safe; `hit` may be called from any thread (a count may then come out low by a race
    between threads, never zero). Objects that hold an original in a table, a default argument or a
    closure are out of reach: targets are attributes that Megatron looks up at call time.
    """

    def __init__(
        self,
        known_sources: Callable[[str], Known] = known,
        version: Callable[[str], str | None] | None = None,
    ) -> None:
        """Make an empty registry.

        Args:
            known_sources: Gives the fingerprints to accept in a package.
            version: Gives a package's version; by default that of the installed files.
        """
        self._known = known_sources
        self._version = version or _installed_version
        self._claims: list[Claim] = []
        self._applied: list[Claim] = []
        self._hits: dict[str, int] = {}

    @property
    def hits(self) -> dict[str, int]:
        """How often each applied target ran, by target name; kept after undo, until `clear`."""
        return dict(self._hits)

    def never_hit(self) -> list[str]:
        """Return the names of applied targets that have not run, in the order of application."""
        return [name for name, count in self._hits.items() if count == 0]

    def claim(self, target: Target | str, owner: str, replacement: Replacement) -> None:
        """Note that `owner` wants to replace `target`; nothing changes until `apply`.

        Args:
            target: A target or the name of one in `targets.TARGETS`.
            owner: Who claims, for messages.
            replacement: Called once by `apply` with the original and the hit counter.

        Raises:
            KeyError: No target has that name.
        """
        found = targets.get(target) if isinstance(target, str) else target
        self._claims.append(Claim(found, owner, replacement))

    def apply(self) -> Applied:
        """Check every claim that is not in place yet, then put them all in place.

        Returns:
            The replacements made, to be undone. Without any claim it is empty, and no module of
            Megatron has been imported.

        Raises:
            ConflictError: A place has more than one claimant.
            AlreadyAppliedError: All claims are in place already.
            PatchError: A target does not fit (see `checks.check`).
        """
        self._refuse_conflicts()
        pending = [claim for claim in self._claims if claim not in self._applied]
        if self._claims and not pending:
            owners = ", ".join(sorted({claim.owner for claim in self._applied}))
            raise errors.AlreadyAppliedError(
                f"the replacements of {owners} are in place already; undo them before applying "
                "them again"
            )
        if not pending:
            return Applied(self, [])
        changes = self._prepare(pending)
        done: list[_Change] = []
        try:
            for change in changes:
                done.append(change)
                self._put_in_place(change)
        except BaseException:  # whatever stopped us, Megatron must not stay half replaced
            Applied(self, done).undo()
            raise
        return Applied(self, changes)

    def clear(self) -> None:
        """Forget all claims and hit counts (for tests).

        Raises:
            PatchError: Some are still in place.
        """
        if self._applied:
            names = ", ".join(claim.target.name for claim in self._applied)
            raise errors.PatchError(f"still in place, undo first: {names}")
        self._claims.clear()
        self._hits.clear()

    def _prepare(self, pending: list[Claim]) -> list[_Change]:
        """Check everything and build every new object; changes nothing of Megatron."""
        modules = [checks.load(claim.target) for claim in pending]
        packages = {claim.target.package for claim in pending}
        versions = {package: self._version(package) for package in packages}
        files = SourceFiles()
        slots = [
            checks.check(
                claim.target,
                module,
                versions[claim.target.package],
                self._known(claim.target.package),
                files,
            )
            for claim, module in zip(pending, modules, strict=True)
        ]
        changes = []
        for claim, slot in zip(pending, slots, strict=True):
            new = claim.replacement(slot.original, self._counter(claim.target.name))
            if new is slot.original:
                raise errors.PatchError(
                    f"{claim.target.name}: {claim.owner} returned the original, not a replacement"
                )
            changes.append(_Change(claim, slot, slot.wrap(new)))
        return changes

    def _put_in_place(self, change: _Change) -> None:
        target, slot = change.claim.target, change.slot
        self._applied.append(change.claim)
        self._hits[target.name] = 0
        if isinstance(slot.holder, ModuleType) and _defined_in(slot.original, target.module):
            change.importers = [
                place for place in _holders(slot.raw, target) if place != (slot.holder, slot.name)
            ]
        slot.write(change.new)
        for module, name in change.importers:
            setattr(module, name, change.new)
        also = ", ".join(f"{module.__name__}.{name}" for module, name in change.importers)
        _log.info(
            "replaced %s (%s) for %s%s",
            target.path,
            target.name,
            change.claim.owner,
            f", and in {also}" if also else "",
        )

    def _refuse_conflicts(self) -> None:
        by_place: dict[str, list[Claim]] = {}
        for claim in self._claims:
            by_place.setdefault(claim.target.path, []).append(claim)
        conflicts = [
            f"{claims[0].target.name} ({place}) is claimed by "
            + ", ".join(claim.owner for claim in claims)
            for place, claims in by_place.items()
            if len(claims) > 1
        ]
        if conflicts:
            raise errors.ConflictError("one place, one owner: " + "; ".join(conflicts))

    def _counter(self, name: str) -> Hit:
        def hit() -> None:
            self._hits[name] = self._hits.get(name, 0) + 1

        return hit

    def _forget(self, claim: Claim) -> None:
        self._applied = [other for other in self._applied if other is not claim]


def _installed_version(package: str) -> str | None:
    return package_version(package, package_root(package))


def _defined_in(thing: Any, module: str) -> bool:
    return not isinstance(thing, ModuleType) and getattr(thing, "__module__", None) == module


def _holders(thing: Any, target: Target) -> Iterator[tuple[ModuleType, str]]:
    """Every global of loaded modules of the target's package, and of the main script, that is it.

    `vars` is read, never `getattr`: lazy modules import on attribute access.
    """
    package = target.module.split(".")[0]
    for loaded_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        if loaded_name.split(".")[0] not in (package, "__main__"):
            continue
        for name, value in list(vars(module).items()):
            if value is thing:
                yield module, name


registry = Registry()
"""The registry of this process."""
