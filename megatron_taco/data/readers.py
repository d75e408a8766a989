"""Documents out of text files, JSON lines and source trees, one at a time."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_taco.data.errors import DataError

_TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".xml", ".sql"),
    *(".toml", ".yaml", ".yml", ".cfg", ".ini", ".proto", ".cmake", ".sh"),
    *(".py", ".pyi", ".pyx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml"),
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".f90", ".m"),
    *(".java", ".scala", ".kt", ".swift", ".go", ".rs", ".js", ".jsx", ".ts", ".tsx"),
)
_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
TEXT_INCLUDE = tuple(f"*{suffix}" for suffix in _TEXT_SUFFIXES)
DEFAULT_INCLUDE = (*TEXT_INCLUDE, *(f"*{suffix}" for suffix in _JSONL_SUFFIXES))


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        where: File, or ``file:line`` for JSON lines; for messages.
        text: Its bytes; UTF-8 if it came from JSON.
        consumed: Bytes of the input file read for it (compressed bytes for ``.gz``), for progress.
    """

    where: str
    text: bytes
    consumed: int


def find_files(inputs: Sequence[Path], include: Sequence[str] | None = None) -> list[Path]:
    """Lists the files to read, in a fixed order.

    Inputs keep their order. A folder is walked without following links to folders, leaving out
    hidden names and ``__pycache__``; its files come sorted by relative path.

    Args:
        inputs: Files and folders.
        include: Globs for files in folders: against the name, or against the relative path if
            the glob holds a ``/``. None means text-like suffixes and JSON lines.

    Raises:
        DataError: If an input is missing or unreadable, a file has a suffix that nothing here
            reads, or a folder holds no matching file.
    """
    patterns = DEFAULT_INCLUDE if include is None else tuple(include)
    files: list[Path] = []
    for source in inputs:
        if source.is_dir():
            found = [source / relative for relative in walk(source, patterns)]
            if not found:
                shown = "text-like suffixes" if include is None else ", ".join(patterns)
                raise DataError(f"{source}: no documents found (looked for {shown})")
            files += found
        elif source.is_file():
            if not _matches(source.name, (*DEFAULT_INCLUDE, *patterns)):
                raise DataError(
                    f"{source}: do not know how to read a {source.suffix or 'suffixless'} file; "
                    "allowed are .txt and other text suffixes, .jsonl, .jsonl.gz and folders "
                    f"(--include '{source.name}' reads it as one text document)"
                )
            files.append(source)
        else:
            raise DataError(f"{source}: no such file or folder")
    return files


def walk(folder: Path, patterns: Sequence[str], exclude_folders: Sequence[str] = ()) -> list[str]:
    """Relative POSIX paths of the matching regular files under ``folder``, sorted.

    Args:
        folder: Where to start.
        patterns: Globs, as in :func:`find_files`.
        exclude_folders: Globs for names of folders not to enter, besides hidden ones and
            ``__pycache__``.

    Raises:
        DataError: If a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    skipped = (".*", "__pycache__", *exclude_folders)
    found: list[str] = []
    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not _matches(name, skipped)]
        for name in names:
            path = Path(here, name)
            relative = path.relative_to(folder).as_posix()
            if not name.startswith(".") and _matches(relative, patterns) and path.is_file():
                found.append(relative)
    return sorted(found, key=lambda relative: relative.split("/"))


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    name = relative.rsplit("/", 1)[-1]
    return any(fnmatchcase(relative if "/" in p else name, p) for p in patterns)


def read_documents(file: Path, key: str = "text") -> Iterator[Document]:
    """Yields the documents of one file: each line's for JSON lines, else the whole file.

    Args:
        file: As listed by :func:`find_files`.
        key: The field of a JSON line that holds the text.

    Raises:
        DataError: If the file cannot be read, or a line is no JSON object with a string under
            ``key``; the message names file and line.
    """
    try:
        if file.name.endswith(_JSONL_SUFFIXES):
            yield from _read_jsonl(file, key)
        else:
            text = file.read_bytes()
            yield Document(str(file), text, len(text))
    # BadGzipFile is an OSError; a truncated or damaged stream raises the other two.
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: cannot be read: {reason}") from error


def _read_jsonl(file: Path, key: str) -> Iterator[Document]:
    with file.open("rb") as raw:
        compressed = gzip.GzipFile(fileobj=raw) if file.name.endswith(".gz") else None
        position = 0
        for number, line in enumerate(compressed or raw, start=1):
            before, position = position, raw.tell() if compressed else position + len(line)
            if not line.isspace():
                where = f"{file}:{number}"
                text = _json_text(line.rstrip(b"\r\n"), key, where)
                yield Document(where, text, position - before)


def _json_text(line: bytes, key: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON at column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise DataError(f"{where}: invalid JSON: nested too deeply") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON object is needed, found {_kind(record)}")
    if key not in record:
        keys = ", ".join(list(record)[:8]) or "none"
        raise DataError(f"{where}: no key {key!r} (--jsonl-key); keys of this line: {keys}")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {key!r} has to be a string, found {_kind(text)}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {key!r} holds half of a surrogate pair at character {error.start}"
        ) from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
