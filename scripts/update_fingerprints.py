#!/usr/bin/env python3
"""Write megatron_taco/patching/fingerprints*.json from unpacked releases.

    pip download --no-deps megatron-core==0.19.2 -d wheels
    python -m zipfile -e wheels/megatron_core-0.19.2-*.whl unpacked/0.19.2
    python scripts/update_fingerprints.py --wheel unpacked/0.19.2 [--wheel ...]

Each folder is one that holds `megatron/` (an unpacked wheel, a site-packages, a checkout); or, with
`--package transformer_engine`, one that holds `transformer_engine/` and pip's notes on it (the
unpacked `transformer-engine` wheel, of a megabyte, will do). Nothing is imported from it. Versions
that are in the file already and are not named again are kept; the table printed shows which
functions upstream changed, and when.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from megatron_taco.patching.fingerprints import FILES, Known, SourceFile
from megatron_taco.patching.inspection import module_path, package_version
from megatron_taco.patching.target import MEGATRON, TRANSFORMER_ENGINE, Target
from megatron_taco.patching.targets import TARGETS
from megatron_taco.patching.te_targets import TE_TARGETS

DATA = Path(__file__).resolve().parent.parent / "megatron_taco" / "patching"
ALL_TARGETS = {MEGATRON: TARGETS, TRANSFORMER_ENGINE: TE_TARGETS}

ByVersion = dict[str, dict[str, str]]


class UsageError(Exception):
    """A folder that cannot be read as a release."""


def read_release(root: Path, package: str) -> tuple[str, dict[str, str]]:
    """Fingerprint every object that a target relies on in one release.

    Args:
        root: Folder that holds the package.
        package: `megatron` or `transformer_engine`.

    Returns:
        The version, and `module:dotted` -> fingerprint of what the release has.

    Raises:
        UsageError: It is not there.
    """
    version = package_version(package, root) if (root / package).is_dir() else None
    if version is None:
        where = "megatron/core/package_info.py" if package == MEGATRON else "dist-info"
        raise UsageError(f"{root}: holds no {where} that states a version of {package}")
    sources: dict[str, SourceFile] = {}
    digests: dict[str, str] = {}
    for target in ALL_TARGETS[package]:
        path = module_path(root, target.module)
        supported = SpecifierSet(target.versions).contains(version, prereleases=True)
        if path is None or not supported:
            continue
        source = sources.setdefault(target.module, SourceFile.read(path))
        for dotted in (*target.fingerprinted, *target.also):
            digest = source.fingerprint(dotted)
            if digest is not None:
                digests[f"{target.module}:{dotted}"] = digest
    return version, digests


def by_version(known: Known) -> ByVersion:
    """Turn object -> fingerprint -> versions round: version -> object -> fingerprint."""
    table: ByVersion = {version: {} for version in known.versions}
    for name, digests in known.objects.items():
        for digest, versions in digests.items():
            for version in versions:
                table[version][name] = digest
    return table


def collect(table: ByVersion, targets: tuple[Target, ...]) -> Known:
    """The reverse of `by_version`, versions oldest first, objects of today's targets only."""
    wanted = {f"{t.module}:{dotted}" for t in targets for dotted in (*t.fingerprinted, *t.also)}
    versions = tuple(sorted(table, key=Version))
    objects: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in sorted(wanted)}
    for version in versions:
        for name, digest in table[version].items():
            if name in wanted:
                objects[name][digest] = (*objects[name].get(digest, ()), version)
    return Known(versions, objects)


def changes_table(known: Known) -> Table:
    """One row an object, one column a version: a letter for each different source."""
    table = Table("object", *known.versions, title="same letter, same source; - absent")
    for name, digests in known.objects.items():
        letters = {
            version: chr(ord("a") + index)
            for index, versions in enumerate(digests.values())
            for version in versions
        }
        cells = [letters.get(version, "-") for version in known.versions]
        style = "bold" if len(set(cells)) > 1 else None
        table.add_row(name.partition(".")[2], *cells, style=style)
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", action="append", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--package", choices=list(FILES), default=MEGATRON)
    parser.add_argument("--output", type=Path, help="the JSON file to update")
    args = parser.parse_args(argv)
    output: Path = args.output or DATA / FILES[args.package]
    table: ByVersion = {}
    if output.is_file():
        table = by_version(Known.from_json(output.read_text(encoding="utf-8")))
    try:
        for root in args.wheel:
            version, digests = read_release(root, args.package)
            table[version] = digests
    except (UsageError, OSError, SyntaxError) as error:
        print(error, file=sys.stderr)
        return 2
    known = collect(table, ALL_TARGETS[args.package])
    output.write_text(known.to_json(), encoding="utf-8")
    Console(width=220).print(changes_table(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
