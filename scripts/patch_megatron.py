#!/usr/bin/env python3
"""Give a Megatron-LM tree the argument --compression-config FILE, or take it back.

    python scripts/patch_megatron.py check  PATH
    python scripts/patch_megatron.py apply  PATH
    python scripts/patch_megatron.py revert PATH

PATH is a folder that holds megatron/: a checkout of Megatron-LM, or a site-packages. The patches
are in patches/, one for each release series; `git apply` takes them as well. Each hunk must be
there exactly once, whatever else the tree has had changed; else nothing is written.
Exit code: 0 done (check: it can be applied, or is), 1 it cannot, 2 a tree that is not known.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_taco.patching.inspection import megatron_version
from megatron_taco.patching.targets import SUPPORTED

PATCHES = Path(__file__).resolve().parent.parent / "patches"

Hunk = tuple[bytes, bytes]


class TreeError(Exception):
    """A tree that cannot be patched; `code` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def find_patch(root: Path) -> tuple[str, Path]:
    """The version of a tree and the patch for it.

    Raises:
        TreeError: No Megatron is there, or one that there is no patch for.
    """
    version = megatron_version(root)
    if version is None:
        raise TreeError(
            f"{root}: holds no megatron/core/package_info.py that states a version; give the "
            "folder above megatron/",
            2,
        )
    patch = PATCHES / f"megatron-lm-{'.'.join(version.split('.')[:2])}.patch"
    if not patch.is_file():
        raise TreeError(
            f"{root}: Megatron {version} is not known; there are patches for {SUPPORTED}: use one "
            "of these, or run your script with `python -m megatron_taco.launch`",
            2,
        )
    return version, patch


def read_patch(patch: Path) -> tuple[str, list[Hunk]]:
    """The file that a patch changes, and what each hunk replaces by what."""
    lines = patch.read_bytes().splitlines(keepends=True)
    name = lines[1].split()[1].decode().removeprefix("b/")
    hunks: list[tuple[list[bytes], list[bytes]]] = []
    for line in lines[2:]:
        if line.startswith(b"@@"):
            hunks.append(([], []))
        if line[:1] in (b" ", b"-"):
            hunks[-1][0].append(line[1:])
        if line[:1] in (b" ", b"+"):
            hunks[-1][1].append(line[1:])
    return name, [(b"".join(old), b"".join(new)) for old, new in hunks]


def is_applied(text: bytes, hunks: list[Hunk]) -> bool:
    """Whether all of a patch is in a file."""
    return all(text.count(new) == 1 for _, new in hunks)


def replace(text: bytes, hunks: list[Hunk], file: Path) -> bytes:
    """A file's text with each hunk's first part replaced by its second.

    Raises:
        TreeError: A hunk is not there exactly once.
    """
    for number, (old, new) in enumerate(hunks, start=1):
        found = text.count(old)
        if found != 1:
            raise TreeError(
                f"{file}: hunk {number} of the patch is there {found} times, not once; nothing was "
                "changed. The file differs from the release there: add the lines by hand, or run "
                "your script with `python -m megatron_taco.launch`",
                1,
            )
        text = text.replace(old, new)
    return text


def run(action: str, root: Path) -> str:
    """Do it; returns one line that says what was done."""
    version, patch = find_patch(root)
    name, hunks = read_patch(patch)
    file = root / name
    try:
        text = file.read_bytes()
    except OSError as error:
        raise TreeError(f"{file}: {error.strerror}", 2) from error
    applied = is_applied(text, hunks)
    about = f"{patch.name} (Megatron {version}) "
    if action == "check":
        if not applied:
            replace(text, hunks, file)
        return about + (f"is applied to {file}" if applied else f"can be applied to {file}")
    if applied == (action == "apply"):
        return about + ("is applied already to" if applied else "is not applied to") + f" {file}"
    if action == "revert":
        hunks = [(new, old) for old, new in hunks]
    file.write_bytes(replace(text, hunks, file))
    return about + ("applied to" if action == "apply" else "taken out of") + f" {file}"


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["apply", "check", "revert"])
    parser.add_argument("path", type=Path, metavar="PATH", help="folder that holds megatron/")
    args = parser.parse_args(argv)
    try:
        print(run(args.action, args.path))
    except (TreeError, OSError) as error:
        print(error, file=sys.stderr)
        return error.code if isinstance(error, TreeError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
