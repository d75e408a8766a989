"""The embedded source ``python-stdlib``: real text that every installation already has.

The .py files of the running interpreter's standard library (CPython 3.12: some 11.5 MB in some
670 files) are tokenised once into a cache folder. Tests, packages installed beside it and files
that differ from build to build (``_sysconfigdata*``, ``config-*``) are left out, so that one
Python version gives one text.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_taco.data.errors import DataError
from megatron_taco.data.locking import file_lock
from megatron_taco.data.readers import walk
from megatron_taco.data.split import held_out
from megatron_taco.data.tokenizers import Tokenizer
from megatron_taco.data.writer import DocumentWriter, output_files

VALID_FRACTION = 0.05
_EXCLUDED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idle_test", "config-*")
_EXCLUDED_FILES = ("_sysconfigdata", "sitecustomize.py", "usercustomize.py")
_FORMAT = 1  # part of the digest; grows when the split or the layout of the files changes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbeddedData:
    """A prepared embedded source.

    Attributes:
        train_prefix: Megatron prefix of the training documents.
        valid_prefix: Megatron prefix of the held-out documents; the sets share no file.
        documents: Non-empty files in both sets.
        tokens: Tokens in both sets, end-of-document ids included.
        valid_documents: Those of them held out.
        valid_tokens: Those of them held out.
        digest: SHA-256 over paths, contents, split and tokeniser. Equal digests mean equal
            ``.bin`` and ``.idx``; the Python version is not part of it.
    """

    train_prefix: Path
    valid_prefix: Path
    documents: int
    tokens: int
    valid_documents: int
    valid_tokens: int
    digest: str


def prepare(
    cache_dir: Path,
    tokenizer: Tokenizer,
    *,
    root: Path | None = None,
    timeout_s: float = 600.0,
) -> EmbeddedData:
    """Tokenises the standard library into ``cache_dir``, or finds what an earlier call wrote.

    Safe to call from all processes of a machine at once: one builds under a lock, the others
    wait. The result appears under its final name by one rename. A call that finds it only reads
    and hashes the sources (about 0.1 s) and imports nothing of Megatron.

    Args:
        cache_dir: Made if missing. Each (Python version, contents, tokeniser) has its own folder.
        tokenizer: Encodes the files; needs an end-of-document id.
        root: Source tree to use in place of the running interpreter's standard library.
        timeout_s: Seconds to wait for another process that builds.

    Raises:
        DataError: If there are no sources (an interpreter without .py files), the tokeniser has
            no end-of-document id, the cache cannot be written, or the wait is over.
    """
    source = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = source_files(source)
    digest = hashlib.sha256(f"{_FORMAT} {VALID_FRACTION} {tokenizer.fingerprint}\n".encode())
    for name, content in _contents(source, names):
        digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    key = digest.hexdigest()
    folder = f"python-stdlib-{platform.python_version()}-{tokenizer.name}-{key[:16]}"
    target = cache_dir / folder

    ready = _load(target, key)
    if ready is not None:
        return ready
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{cache_dir}: cannot be made: {error.strerror}") from error
    with file_lock(cache_dir / f".{folder}.lock", "preparing python-stdlib", timeout_s):
        ready = _load(target, key)
        if ready is None:
            _build(source, names, target, tokenizer, key)
            ready = _load(target, key)
    if ready is None:
        raise DataError(f"{target}: was changed by another program while it was written")
    return ready


def source_files(root: Path) -> list[str]:
    """Relative POSIX paths of the files that make up the source, sorted.

    Raises:
        DataError: If there are none.
    """
    found = walk(root, ("*.py",), _EXCLUDED_FOLDERS) if root.is_dir() else []
    names = [n for n in found if not n.rsplit("/", 1)[-1].startswith(_EXCLUDED_FILES)]
    if not names:
        raise DataError(
            f"python-stdlib: no .py files under {root}; this Python keeps its library compiled or "
            "zipped: prepare text of your own with `megatron-taco prepare-data`"
        )
    return names


def is_validation(name: str) -> bool:
    """Whether the file with this relative path is held out (about one in twenty)."""
    return held_out(name.encode("utf-8", "surrogateescape"), VALID_FRACTION)


def _contents(root: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        try:
            yield name, (root / name).read_bytes()
        except OSError as error:
            raise DataError(f"{root / name}: cannot be read: {error.strerror}") from error


def _load(target: Path, key: str) -> EmbeddedData | None:
    """The dataset in ``target`` if it is whole and was made for ``key``, else None."""
    try:
        manifest: dict[str, Any] = json.loads((target / "manifest.json").read_text("utf-8"))
        sizes = {name: (target / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError):
        return None
    if manifest["data"].get("digest") != key or sizes != manifest["files"]:
        return None
    prefixes = {f"{part}_prefix": target / f"{part}_text_document" for part in ("train", "valid")}
    return EmbeddedData(**(manifest["data"] | prefixes))


def _build(root: Path, names: list[str], target: Path, tokenizer: Tokenizer, key: str) -> None:
    """Writes both sets and the manifest into a hidden folder and renames it to ``target``."""
    started = time.monotonic()
    stem = f".{target.name}.tmp-"
    for stale in target.parent.glob(f"{stem}*"):  # of builders that were killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    hidden = target.with_name(f"{stem}{os.getpid()}")
    try:
        data, files = _write(root, names, hidden, tokenizer, key)
        kept = {name: value for name, value in asdict(data).items() if "prefix" not in name}
        manifest = {"data": kept, "files": files}
        (hidden / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
        if target.exists():  # damaged, or _load would have taken it
            shutil.rmtree(target)
        hidden.rename(target)
    except OSError as error:
        raise DataError(f"{target}: cannot write: {error.strerror}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    _log.info(
        "python-stdlib: %d documents, %d tokens, %.1f s",
        data.documents,
        data.tokens,
        time.monotonic() - started,
    )


def _write(
    root: Path, names: list[str], folder: Path, tokenizer: Tokenizer, key: str
) -> tuple[EmbeddedData, dict[str, int]]:
    prefixes = [folder / f"{part}_text_document" for part in ("train", "valid")]
    with (
        DocumentWriter(prefixes[0], tokenizer.vocab_size) as train,
        DocumentWriter(prefixes[1], tokenizer.vocab_size) as valid,
    ):
        for name, content in _contents(root, names):
            if content:
                writer = valid if is_validation(name) else train
                writer.add(tokenizer.encode(content, str(root / name)), name)
    data = EmbeddedData(
        train_prefix=prefixes[0],
        valid_prefix=prefixes[1],
        documents=train.documents + valid.documents,
        tokens=train.tokens + valid.tokens,
        valid_documents=valid.documents,
        valid_tokens=valid.tokens,
        digest=key,
    )
    written = [file for prefix in prefixes for file in output_files(prefix)]
    return data, {file.name: file.stat().st_size for file in written}
