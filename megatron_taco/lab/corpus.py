"""A corpus of source and documentation text of the packages that a machine has installed.

For studies of accuracy where nothing can be downloaded. A package is what a folder of packages has
on its top level. Whole packages are held out, and what repeats other text is dropped, so that the
held-out text is new:

    packages, in the order of a hash of their names
      -> the held-out ones: each small, together a given share of all bytes
      -> documents: text of a size and shape that a person may have written
      -> without those whose text, or more than half of whose longer lines, were seen before;
         held-out packages come first
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron_taco.data.errors import DataError
from megatron_taco.data.readers import TEXT_INCLUDE, walk

_INCLUDE: Final = (*TEXT_INCLUDE, "METADATA")
_METADATA_FOLDERS: Final = (".dist-info", ".egg-info")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes a corpus of what is installed; part of its digest.

    Attributes:
        smallest: Bytes of the smallest document.
        largest: Bytes of the largest: larger files are mostly tables that programs wrote.
        line: Characters of the longest mean line, for the same reason.
        long_line: Characters from which a line counts as one that is recognised.
        repeated: Share of the characters in such lines above which a document repeats others.
        held_out: Share of all bytes in held-out packages, at least.
        package: A held-out package has at most this share of all bytes.
        limit: Bytes of packages to take at all; None takes all.
    """

    smallest: int = 200
    largest: int = 500_000
    line: int = 160
    long_line: int = 20
    repeated: float = 0.5
    held_out: float = 0.02
    package: float = 0.01
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """One document.

    Attributes:
        package: Its package.
        name: Package folder and path within.
        text: Its text, lines ended by a line feed.
    """

    package: str
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What was found.

    Attributes:
        train: Documents to train on.
        valid: Documents of the held-out packages.
        packages: Number of packages.
        held_out: Names of the held-out ones, sorted.
        dropped: Files left out, by reason.
    """

    train: list[Text]
    valid: list[Text]
    packages: int
    held_out: list[str]
    dropped: Counter[str] = field(default_factory=Counter)

    def digest(self) -> str:
        """Return SHA-256 over sets, names and texts."""
        digest = hashlib.sha256()
        for part, documents in (("train", self.train), ("valid", self.valid)):
            for each in documents:
                head = f"{part}\0{each.name}\0{len(each.text)}\0"
                digest.update(head.encode("utf-8", "surrogateescape"))
                digest.update(each.text.encode())
        return digest.hexdigest()


def installed_roots() -> list[Path]:
    """Folders of packages of this machine: Python's, the compilers', the documentation's."""
    paths = sysconfig.get_paths()
    named = [Path(paths[key]) for key in ("stdlib", "purelib", "platlib")]
    named += [Path("/usr/lib/python3/dist-packages"), Path("/usr/include"), Path("/usr/share/doc")]
    found: list[Path] = []
    for path in named:
        if path.is_dir() and path not in found:
            found.append(path)
    return found


def collect(roots: Sequence[Path], recipe: Recipe) -> Corpus:
    """Read the corpus of the packages in some folders.

    Args:
        roots: Folders whose entries are packages. One inside another is left out of that one.
        recipe: What is taken.

    Raises:
        DataError: If nothing is found to train on, or nothing to hold out.
    """
    files = _files(roots)
    order = _limited(_order(files), recipe.limit)
    total = sum(size for _, size in order)
    held_out: list[str] = []
    held = 0
    for name, size in order:
        if held < recipe.held_out * total and size <= recipe.package * total:
            held_out.append(name)
            held += size
    filter_ = _Filter(recipe)
    valid = [each for name in held_out for each in filter_.keep(_read(name, files[name]))]
    rest = [name for name, _ in order if name not in set(held_out)]
    train = [each for name in rest for each in filter_.keep(_read(name, files[name]))]
    if not train or not valid:
        raise DataError(
            f"{', '.join(map(str, roots))}: {len(order)} package(s) with {total:,} bytes of text "
            f"leave {len(train)} documents to train on and {len(valid)} to hold out; name folders "
            "with more packages"
        )
    return Corpus(
        train=train,
        valid=valid,
        packages=len(order),
        held_out=sorted(held_out),
        dropped=filter_.dropped,
    )


def _package(relative: str) -> str:
    """The name of the package that a path below a root belongs to."""
    top = relative.split("/", 1)[0]
    for ending in _METADATA_FOLDERS:
        if top.endswith(ending):
            top = top.removesuffix(ending).rsplit("-", 1)[0]
    if top == relative:
        top = top.rsplit(".", 1)[0]
    return top.lower().replace("-", "_")


def _files(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """The text files of each package, sorted by root and path."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        inner = [other for other in roots if other != root and other.is_relative_to(root)]
        for relative in walk(root, _INCLUDE, ("site-packages", "dist-packages")):
            path = root / relative
            if path.is_symlink() or any(path.is_relative_to(other) for other in inner):
                continue
            found.setdefault(_package(relative), []).append(path)
    return found


def _order(files: dict[str, list[Path]]) -> list[tuple[str, int]]:
    """Packages and their bytes, in the order of a hash of the name."""

    def key(name: str) -> bytes:
        return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()

    return [(name, sum(p.stat().st_size for p in files[name])) for name in sorted(files, key=key)]


def _limited(order: list[tuple[str, int]], limit: int | None) -> list[tuple[str, int]]:
    if limit is None:
        return order
    taken: list[tuple[str, int]] = []
    for name, size in order:
        if sum(each for _, each in taken) + size <= limit:
            taken.append((name, size))
    return taken


def _read(package: str, files: Iterable[Path]) -> Iterator[tuple[str, str, bytes]]:
    for file in files:
        try:
            yield package, str(file), file.read_bytes()
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error


class _Filter:
    """Drops what is no text of a person, and what repeats what it has kept."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.dropped: Counter[str] = Counter()
        self._texts: set[bytes] = set()
        self._lines: set[int] = set()

    def keep(self, files: Iterable[tuple[str, str, bytes]]) -> Iterator[Text]:
        for package, name, content in files:
            text = self._text(content)
            reason = self._reason(text)
            if reason:
                self.dropped[reason] += 1
            elif text is not None:
                yield Text(package, name, text)

    @staticmethod
    def _text(content: bytes) -> str | None:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return None
        return None if "\0" in text else text.replace("\r\n", "\n")

    def _reason(self, text: str | None) -> str:
        """Why a document is left out, or nothing; what is kept is remembered."""
        recipe = self.recipe
        if text is None:
            return "no UTF-8"
        if not recipe.smallest <= len(text) <= recipe.largest:
            return "size"
        lines = text.split("\n")
        if len(text) > recipe.line * len(lines):
            return "long lines"
        words = hashlib.sha256(" ".join(text.split()).encode()).digest()
        if words in self._texts:
            return "same text"
        long = [line for each in lines if len(line := each.strip()) >= recipe.long_line]
        repeated = sum(len(line) for line in long if hash(line) in self._lines)
        if repeated > recipe.repeated * sum(map(len, long)):
            return "same lines"
        self._texts.add(words)
        self._lines.update(map(hash, long))
        return ""
