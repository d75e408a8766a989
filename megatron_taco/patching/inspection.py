"""Compares one target with the Megatron that is installed, from its files alone.

Nothing of Megatron or torch is imported, so `megatron-taco doctor` can tell what is wrong with an
installation that does not even import. The registry asks the same questions before it changes
anything.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_taco.patching.fingerprints import Known, SourceFiles
from megatron_taco.patching.target import DISTRIBUTIONS, MEGATRON, Target

Status = Literal["ok", "changed", "missing", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found out about one target.

    Attributes:
        target: The target that was looked at.
        status: `ok`; `unsupported` (version), `missing` (no such file or name), `changed` (source
            not known).
        file: The file's path relative to the folder that holds the package.
        version: The version found, or None.
        fingerprints: Dotted object -> its fingerprint as found (None where it does not exist).
        like: The release whose code this is: the version itself, or the newest of those that have
            all of the same fingerprints; None where there is none.
        detail: One line for people, empty when `ok`.
    """

    target: Target
    status: Status
    file: str
    version: str | None
    fingerprints: dict[str, str | None]
    like: str | None
    detail: str


def megatron_root() -> Path | None:
    """Return the folder that holds the `megatron` package, or None where none is installed.

    `megatron` is a namespace package: the folder is that of `megatron.core`.
    """
    spec = util.find_spec("megatron")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / "core").is_dir():
            return Path(location).parent
    return None


def megatron_version(root: Path) -> str | None:
    """Return megatron-core's version as its own `package_info.py` states it, or None.

    Package metadata may be of another copy than the one that is imported (a checkout on
    `PYTHONPATH` in front of a wheel); this file belongs to the code itself.
    """
    path = root / "megatron" / "core" / "package_info.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    values: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for name in node.targets:
                if isinstance(name, ast.Name):
                    values[name.id] = node.value.value
    try:
        numbers = [values[key] for key in ("MAJOR", "MINOR", "PATCH")]
        text = ".".join(str(number) for number in numbers) + str(values.get("PRE_RELEASE", ""))
        return str(Version(text))
    except (KeyError, InvalidVersion):
        return None


def package_root(package: str) -> Path | None:
    """Return the folder that holds a package which targets are in, or None where there is none."""
    if package == MEGATRON:
        return megatron_root()
    spec = util.find_spec(package)
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def package_version(package: str, root: Path | None) -> str | None:
    """Return a package's version, or None.

    Args:
        package: ``megatron`` or ``transformer_engine``.
        root: The folder that holds it. What pip noted there comes before what it noted elsewhere.
    """
    if root is None:
        return None
    if package == MEGATRON:
        return megatron_version(root)
    name = DISTRIBUTIONS[package]
    here = next(iter(metadata.distributions(name=name, path=[str(root)])), None)
    if here is not None:
        return here.version
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def inspect_target(
    target: Target, path: Path | None, version: str | None, known: Known, files: SourceFiles
) -> Finding:
    """Compare one target with a source file.

    Args:
        target: The target.
        path: The file of `target.module`, or None where it was not found.
        version: The version found, or None where it could not be told.
        known: Fingerprints to accept. A version that is in none of them is accepted when its code
            is that of one which is.
        files: Reads the source.

    Returns:
        The finding; nothing is raised for what the package looks like.
    """
    package = path is not None and path.name == "__init__.py"

    def finding(
        status: Status,
        detail: str = "",
        fingerprints: dict[str, str | None] | None = None,
        like: str | None = None,
    ) -> Finding:
        return Finding(
            target=target,
            status=status,
            file="/".join(target.module.split(".")) + ("/__init__.py" if package else ".py"),
            version=version,
            fingerprints=fingerprints or {},
            like=like,
            detail=detail,
        )

    if version is None:
        return finding("missing", f"{target.distribution} was not found")
    if not SpecifierSet(target.versions).contains(version, prereleases=True):
        detail = f"{target.distribution} {version} is not in {target.versions}"
        return finding("unsupported", detail)
    if path is None or not path.is_file():
        return finding("missing", "the file does not exist")
    try:
        source = files.read(path)
    except (OSError, SyntaxError) as error:
        return finding("missing", f"the file cannot be parsed: {error}")
    fingerprints = {name: source.fingerprint(name) for name in target.fingerprinted}
    absent = [name for name, digest in fingerprints.items() if digest is None]
    fingerprints |= {name: digest for name in target.also if (digest := source.fingerprint(name))}
    if not source.find(target.attribute):
        absent.insert(0, target.attribute)
    if absent:
        names = ", ".join(dict.fromkeys(absent))
        return finding("missing", f"the file does not define {names}", fingerprints)
    seen = {
        name: known.seen_in(target.module, name, digest)
        for name, digest in fingerprints.items()
        if digest is not None
    }
    changed = [name for name, versions in seen.items() if not versions]
    if changed:
        found = ", ".join(f"{name} ({(fingerprints[name] or '')[:12]})" for name in changed)
        detail = f"source not known from {', '.join(known.versions) or 'any release'}: {found}"
        return finding("changed", detail, fingerprints)
    shared = [v for v in known.versions if all(v in versions for versions in seen.values())]
    like = version if version in shared else (shared[-1] if shared else None)
    return finding("ok", "", fingerprints, like)


def module_path(root: Path, module: str) -> Path | None:
    """Return the file of a dotted module below `root`, or None where there is none."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def inspect_all(
    targets: tuple[Target, ...], known: Known, package: str = MEGATRON
) -> list[Finding]:
    """Compare every target with the installed package, in table order."""
    root = package_root(package)
    version = package_version(package, root)
    files = SourceFiles()
    return [
        inspect_target(
            target, module_path(root, target.module) if root else None, version, known, files
        )
        for target in targets
    ]
