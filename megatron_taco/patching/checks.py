"""What must be true of a live target before the registry replaces it; each check raises."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from megatron_taco.patching import errors
from megatron_taco.patching.attributes import Slot, resolve
from megatron_taco.patching.fingerprints import Known, SourceFile, SourceFiles
from megatron_taco.patching.inspection import Finding, inspect_target
from megatron_taco.patching.target import Target

_ERRORS = {
    "unsupported": errors.UnsupportedVersionError,
    "missing": errors.MissingTargetError,
    "changed": errors.FingerprintError,
}


def load(target: Target) -> ModuleType:
    """Import the target's module.

    Raises:
        MissingTargetError: It cannot be imported; the cause is chained.
    """
    try:
        return importlib.import_module(target.module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # TE raises all of them
        raise errors.MissingTargetError(
            f"{target.name}: {target.module} cannot be imported ({error}); "
            "`megatron-taco doctor` shows what is installed"
        ) from error


def check(
    target: Target, module: ModuleType, version: str | None, known: Known, files: SourceFiles
) -> Slot:
    """Check version, existence, source, foreign replacement and signature, in this order.

    Args:
        target: The target.
        module: Its imported module.
        version: The version found.
        known: Fingerprints to accept.
        files: Reads the module's source.

    Returns:
        The slot of the attribute, unchanged.

    Raises:
        PatchError: The subclass that names what does not fit.
    """
    path = Path(module.__file__) if module.__file__ else None
    finding = inspect_target(target, path, version, known, files)
    if finding.status != "ok":
        raise _ERRORS[finding.status](_message(finding))
    try:
        slot = resolve(module, target.attribute)
    except AttributeError as error:
        raise errors.MissingTargetError(
            f"{target.name}: {target.path} does not exist in the loaded module ({error}); {_ASK}"
        ) from error
    if path is not None:
        _refuse_foreign(target, slot, files.read(path), path)
    _check_parameters(target, slot.original)
    return slot


_ASK = "run `megatron-taco doctor` and install a supported release"


def _message(finding: Finding) -> str:
    target = finding.target
    text = f"{target.name} ({target.path} in {finding.file}): {finding.detail}"
    what_to_do = {
        "unsupported": f"install one that is: pip install '{target.distribution}{target.versions}'",
        "missing": f"supported is {target.distribution} {target.versions}; {_ASK}",
        "changed": (
            f"found {target.distribution} {finding.version} with an edited or newer body; our "
            "wrapper may be wrong there, so nothing was changed. Install a supported release, or "
            "check the wrapper and add the source with scripts/update_fingerprints.py"
        ),
    }
    return f"{text}; {what_to_do[finding.status]}"


def _refuse_foreign(target: Target, slot: Slot, source: SourceFile, path: Path) -> None:
    """Refuse an undecorated function or class that is not the one its file defines."""
    node = source.definition(target.attribute)
    if node is None or node.decorator_list:
        return  # an alias, or wrapped by Megatron itself: nothing to compare with
    live = slot.original
    if inspect.isclass(live):
        native = live.__module__ == target.module and live.__qualname__ == target.attribute
    else:
        native = (
            isinstance(live, FunctionType)
            and Path(live.__code__.co_filename) == path
            and live.__code__.co_name == node.name
        )
    if not native:
        raise errors.ForeignPatchError(
            f"{target.name}: {target.path} was replaced already, by {describe(live)}; "
            "two packages cannot wrap one place safely. Remove the other patch, or switch off "
            "the feature of ours that needs this target"
        )


def _check_parameters(target: Target, live: Any) -> None:
    if not target.parameters:
        return
    try:
        found = list(inspect.signature(live).parameters)
    except (TypeError, ValueError) as error:
        raise errors.SignatureError(
            f"{target.name}: {target.path} is {describe(live)}, which has no signature ({error})"
        ) from error
    lacking = [name for name in target.parameters if name not in found]
    if lacking:
        raise errors.SignatureError(
            f"{target.name}: {target.path} has no parameter {', '.join(lacking)}; "
            f"found ({', '.join(found)}); supported is {target.distribution} {target.versions}"
        )


def describe(thing: Any) -> str:
    """Name an object for a message: what it is called and which module it is from."""
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__}"
    name = getattr(thing, "__qualname__", None)
    if name is None:
        return f"a {type(thing).__qualname__} of {type(thing).__module__}"
    code = getattr(thing, "__code__", None)
    home = getattr(thing, "__module__", None)
    if code is not None:  # `functools.wraps` copies __module__; the code tells the truth
        home = next(
            (
                loaded_name
                for loaded_name, loaded in list(sys.modules.items())
                if getattr(loaded, "__file__", None) == code.co_filename
            ),
            Path(code.co_filename).name,
        )
    return f"{name} of {home}"
