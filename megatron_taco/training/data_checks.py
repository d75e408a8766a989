"""Checks that the data, the tokenizer and the checkpoint of a run are what it needs.

Megatron repeats a data set until it has enough samples. A split without tokens it repeats for ever,
at full load and without a word (`GPTDataset._get_num_epochs`, megatron-core 0.18 and 0.19); ids
beyond the vocabulary fail inside the embedding, on a GPU as an assertion of a kernel; and where
there is no checkpoint to load it trains from scratch. All three are found here, before any process
group exists.
"""

from __future__ import annotations

import os
import struct
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_taco.config import Config, Problem
from megatron_taco.data.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SPLITS: Final = ("training", "validation", "test")
_PATHS: Final = {"train_path": 0, "valid_path": 1, "test_path": 2}
_CHUNKS, _CHUNK_TOKENS, _ENDS = 16, 1 << 16, 256
_MAGIC: Final = b"MMIDIDX\0\0"
_HEAD: Final = struct.Struct("<9sQBQQ")  # magic, version, type of a token, documents, their ends
_TRACKER: Final = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class _Corpus:
    """One prefix: `lengths` in tokens of its documents, int32 [documents]; `tokens`, [total]."""

    prefix: str
    lengths: npt.NDArray[np.int32]
    tokens: npt.NDArray[Any]


def check(config: Config, args: Namespace) -> list[Problem]:
    """Return what is wrong with the data, the tokenizer and the checkpoint; changes nothing.

    Reads the .idx of every prefix, and of its .bin about a million tokens at most.

    Args:
        config: A loaded configuration whose files are there (`config.files.missing_files`).
        args: Megatron's validated arguments for it.
    """
    problems = [*_checkpoint(config, args), *_loaded(config, args), *_saved(config, args)]
    vocabulary, found = _vocabulary(config)
    problems += found
    for key in ("path", "train_path", "valid_path", "test_path"):
        prefixes = [p for p in getattr(config.data, key) or () if isinstance(p, str)]
        for prefix in dict.fromkeys(prefixes):
            corpus = _read(prefix)
            if isinstance(corpus, str):
                problems.append(config.problem(f"data.{key}", corpus))
                continue
            texts = [*_short_splits(key, corpus, args, config)]
            texts += _foreign_ids(corpus, vocabulary, str(config.data.tokenizer))
            problems += [config.problem(f"data.{key}", text) for text in texts]
    return problems


def _checkpoint(config: Config, args: Namespace) -> Iterator[Problem]:
    """Yield where a checkpoint is asked for and there is none."""
    if getattr(args, "non_persistent_ckpt_type", None) is not None:
        return  # the newest may lie elsewhere, or in another machine's memory
    asked = {name: getattr(args, name) for name in ("load", "pretrained_checkpoint")}
    # Megatron takes the second where the first has none yet.
    absent = {
        name: folder
        for name, folder in asked.items()
        if folder is not None and "://" not in folder and not (Path(folder) / _TRACKER).is_file()
    }
    if asked["load"] is not None and "load" not in absent:
        return
    if asked["pretrained_checkpoint"] is not None and "pretrained_checkpoint" not in absent:
        return
    for name, folder in absent.items():
        yield config.problem(
            f"megatron.{name}",
            f"there is no checkpoint in {folder} (no {_TRACKER}); to start from nothing leave "
            f"{name} out",
        )


def _loaded(config: Config, args: Namespace) -> Iterator[Problem]:
    """Yield what is wrong with the checkpoint's marker, or with the iteration that is asked for."""
    load = args.load
    if getattr(args, "non_persistent_ckpt_type", None) is not None:
        return
    if load is None or "://" in load or not (Path(load) / _TRACKER).is_file():
        return
    marker = (Path(load) / _TRACKER).read_text("utf-8", errors="replace").strip()
    asked = getattr(args, "ckpt_step", None)
    found = sorted(path.name for path in Path(load).glob("iter_*"))
    there = ", ".join(found) or "none"
    if asked is None and marker != "release" and not marker.isdecimal():
        yield config.problem(
            "megatron.load",
            f"{load}/{_TRACKER} holds {marker!r}, allowed: a number of an iteration; there are: "
            f"{there}",
        )
    elif asked is not None or marker != "release":
        name = f"iter_{int(marker if asked is None else asked):07d}"
        if not (Path(load) / name).is_dir():
            key = "megatron.load" if asked is None else "megatron.ckpt_step"
            yield config.problem(key, f"there is no {name} in {load}; there are: {there}")


def _saved(config: Config, args: Namespace) -> Iterator[Problem]:
    """Yield where checkpoints could not be written, before hours of training are lost."""
    if args.save is None or "://" in args.save:
        return
    folder = Path(args.save).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield config.problem(
            "megatron.save", f"{args.save} cannot be written: {folder} is no folder or not ours"
        )


def _vocabulary(config: Config) -> tuple[int | None, list[Problem]]:
    """Return the number of the tokenizer's ids (None if it cannot be read), and what is wrong."""
    tokenizer, rows = config.data.tokenizer, config.model.vocab_size
    if tokenizer.kind != "hf":
        return tokenizer.vocab_size, []
    from megatron_taco.data import load_tokenizer

    try:
        size = load_tokenizer(str(tokenizer)).vocab_size
    except DataError as error:
        return None, [config.problem("data.tokenizer", str(error))]
    if rows is not None and rows < size:
        message = f"{rows} rows are too few for the {size} ids of data.tokenizer ({tokenizer})"
        message += f"; allowed: at least {size}"
        return size, [config.problem("model.vocab_size", message)]
    return size, []


def _read(prefix: str) -> _Corpus | str:
    """Map a data set, or say what is wrong with its files."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType

    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
                return f"{prefix}.idx is not the index of a Megatron data set; prepare it again"
            _, _, code, documents, ends = _HEAD.unpack(head)
            lengths = np.fromfile(file, dtype=np.int32, count=documents)
        dtype = np.dtype(DType.dtype_from_code(code))
        size, index = (Path(prefix + s).stat().st_size for s in (".bin", ".idx"))
    except (OSError, ValueError) as error:  # ValueError: no such code
        return f"{prefix}: cannot be read: {error}"
    expected = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    # Lengths (4 bytes), places (8), and ends of documents (8): BERT-like data have a byte more.
    whole = index >= _HEAD.size + 12 * documents + 8 * ends
    if not documents or not whole or size < expected:
        return (
            f"{prefix}.bin has {size} bytes and {prefix}.idx, of {index}, speaks of {expected} in "
            f"{documents} documents; one of them is cut off, empty, or of another data set: "
            "prepare it again"
        )
    shape = (size // dtype.itemsize,)
    tokens = np.memmap(f"{prefix}.bin", mode="r", dtype=dtype, shape=shape)
    return _Corpus(prefix=prefix, lengths=lengths, tokens=tokens)


def _short_splits(key: str, corpus: _Corpus, args: Namespace, config: Config) -> Iterator[str]:
    """Yield the splits with a share of a data set too small to be read.

    One without a token is never let through, since Megatron builds it used or not; one with less
    than a sequence only if it is not used.
    """
    evaluates = bool(args.eval_iters) or bool(getattr(args, "full_validation", False))
    documents, needed = len(corpus.lengths), args.seq_length + 1
    for i, share, begin, end in _shares(key, documents, args):
        tokens = int(corpus.lengths[begin:end].sum(dtype="int64"))
        if tokens > 0 and (tokens >= needed or not (i == 0 or evaluates)):
            continue
        part = f"{corpus.prefix} has {_amount(documents, int(corpus.lengths.sum()))}"
        found = _amount(end - begin, tokens)
        if key == "path":
            given = "data.split" if config.data.split else "data.split (not set)"
            part += f", of which {given} {args.split!r} gives {_SPLITS[i]} a share of {share:.3g}"
            part += f", {found}"
            change = "give more documents or other shares"
            if i > 0:
                change += f", in data.split, for instance 0 for {_SPLITS[i]}"
        else:
            change = "give more text"
        why = (
            "Megatron would never finish building that part"
            if tokens == 0
            else f"one sequence needs {needed} tokens (megatron.seq_length + 1)"
        )
        yield f"{part}; {why}: {change}"


def _amount(documents: int, tokens: int) -> str:
    return f"{documents} document{'' if documents == 1 else 's'} ({tokens} tokens)"


def _shares(key: str, documents: int, args: Namespace) -> Iterator[tuple[int, float, int, int]]:
    """Yield (split, share, first document, end) for every split of a prefix that has a share."""
    if key != "path":
        yield _PATHS[key], 1.0, 0, documents
        return
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    vector = parse_and_normalize_split(args.split)
    for i, bounds in enumerate(convert_split_vector_to_split_matrix(vector)):
        if bounds is not None:
            # As in BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
            begin, end = (round(bound * float(documents)) for bound in bounds)
            yield i, vector[i], begin, end


def _foreign_ids(corpus: _Corpus, vocabulary: int | None, tokenizer: str) -> Iterator[str]:
    """Yield a message if a sample of the tokens holds an id that the tokenizer does not have."""
    if vocabulary is None or not len(corpus.tokens):
        return
    lowest, highest = _extremes(corpus)
    found = lowest if lowest < 0 else highest
    if 0 <= found < vocabulary:
        return
    yield (
        f"{corpus.prefix} holds the token id {found}; the {vocabulary} ids of data.tokenizer "
        f"({tokenizer}) are 0 to {vocabulary - 1}: it was written with another tokenizer; name "
        "that one, or prepare the data again"
    )


def _extremes(corpus: _Corpus) -> tuple[int, int]:
    """Return the least and the greatest id of evenly spaced chunks and of ends of documents."""
    import numpy as np

    total = len(corpus.tokens)
    if total <= _CHUNKS * _CHUNK_TOKENS:
        return int(corpus.tokens.min()), int(corpus.tokens.max())
    starts = np.linspace(0, total - _CHUNK_TOKENS, _CHUNKS).astype(np.int64)
    ends = np.cumsum(corpus.lengths, dtype=np.int64)[corpus.lengths > 0] - 1
    some = ends[np.linspace(0, len(ends) - 1, min(_ENDS, len(ends))).astype(np.int64)]
    parts = [corpus.tokens[start : start + _CHUNK_TOKENS] for start in starts.tolist()]
    parts.append(corpus.tokens[some])
    return min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
