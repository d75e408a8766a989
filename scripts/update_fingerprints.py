#!/usr/bin/env python3
"""Write megatron_taco/patching/fingerprints.json from unpacked megatron-core releases.

    pip download --no-deps megatron-core==0.19.2 -d wheels
    python -m zipfile -e wheels/megatron_core-0.19.2-*.whl unpacked/0.19.2
    python scripts/update_fingerprints.py --wheel unpacked/0.19.2 [--wheel ...]

Each folder is one that holds `megatron/` (an unpacked wheel, a site-packages, a checkout). Nothing
is imported from it. Versions that are in the file already and are not named again are kept; the
table printed shows which functions upstream changed, and when.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from megatron_taco.patching.fingerprints import Known, SourceFile
from megatron_taco.patching.inspection import megatron_version, module_path
from megatron_taco.patching.targets import TARGETS

DATA = Path(__file__).resolve().parent.parent / "megatron_taco" / "patching" / "fingerprints.json"

ByVersion = dict[str, dict[str, str]]


class UsageError(Exception):
    """A folder that cannot be read as a Megatron release."""


def read_release(root: Path) -> tuple[str, dict[str, str]]:
    """Fingerprint every object that a target relies on in one release.

    Args:
        root: Folder that holds `megatron/`.

    Returns:
        The version, and `module:dotted` -> fingerprint of what the release has.

    Raises:
        UsageError: No megatron-core is there.
    """
    version = megatron_version(root)
    if version is None:
        raise UsageError(f"{root}: holds no megatron/core/package_info.py that states a version")
    sources: dict[str, SourceFile] = {}
    digests: dict[str, str] = {}
    for target in TARGETS:
        path = module_path(root, target.module)
        supported = SpecifierSet(target.versions).contains(version, prereleases=True)
        if path is None or not supported:
            continue
        source = sources.setdefault(target.module, SourceFile.read(path))
        for dotted in target.fingerprinted:
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


def collect(table: ByVersion) -> Known:
    """The reverse of `by_version`, versions oldest first, objects of today's targets only."""
    wanted = {f"{t.module}:{dotted}" for t in TARGETS for dotted in t.fingerprinted}
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
        table.add_row(name.removeprefix("megatron."), *cells, style=style)
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", action="append", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=DATA, help="the JSON file to update")
    args = parser.parse_args(argv)
    table: ByVersion = {}
    if args.output.is_file():
        table = by_version(Known.from_json(args.output.read_text(encoding="utf-8")))
    try:
        for root in args.wheel:
            version, digests = read_release(root)
            table[version] = digests
    except (UsageError, OSError, SyntaxError) as error:
        print(error, file=sys.stderr)
        return 2
    known = collect(table)
    args.output.write_text(known.to_json(), encoding="utf-8")
    Console(width=140).print(changes_table(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
