"""A corpus as token ids: its own byte-pair vocabulary, ``.bin`` / ``.idx``, and what they are.

Needs the package ``tokenizers`` to be made and nothing to be used: Megatron reads the ids alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatron_taco.data.errors import DataError
from megatron_taco.data.locking import file_lock
from megatron_taco.data.writer import DocumentWriter, output_files
from megatron_taco.lab.corpus import Corpus, Recipe, Text, collect

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END: Final = "<|end|>"
_BATCH: Final = 500
_SAMPLE: Final = 64_000_000
"""Characters that the vocabulary is learned from, spread over all training documents."""
_FORMAT: Final = 1
_WAIT_S: Final = 1800.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A corpus in a folder, ready to be trained on.

    Attributes:
        folder: Where it is.
        recipe: How it was made.
        roots: From which folders.
        vocab: Token ids there are.
        digest: SHA-256 of the texts.
        packages: Number of packages.
        held_out: Names of those held out.
        documents: Of both sets, by name of the set.
        text_bytes: Likewise, UTF-8.
        tokens: Likewise, ends of documents included.
        dropped: Files left out, by reason.
    """

    folder: Path
    recipe: dict[str, Any]
    roots: list[str]
    vocab: int
    digest: str
    packages: int
    held_out: list[str]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]

    def prefix(self, part: str) -> Path:
        """Return Megatron's prefix of ``train`` or ``valid``."""
        return self.folder / f"{part}_text_document"

    def overrides(self) -> list[str]:
        """Return what the trainer's configuration says for it."""
        return [
            *("data.source=null", "data.path=null", "data.split=null"),
            *(f"data.{part}_path={self.prefix(part)}" for part in ("train", "valid")),
            f"data.tokenizer={{null: {self.vocab}}}",
        ]

    def describe(self) -> str:
        """Return what it is, in two sentences."""
        return (
            f"{self.tokens['train']:,} unique training tokens ({self.text_bytes['train'] / 1e6:.0f}"
            f" MB in {self.documents['train']:,} documents) and {self.tokens['valid']:,} held out, "
            f"of {self.packages} installed packages of which {len(self.held_out)} are held out "
            f"whole; repeated text is dropped. Byte-pair vocabulary of {self.vocab:,}, learned from"
            f" the training text; SHA-256 of the texts {self.digest[:16]}."
        )


def load(folder: Path) -> Prepared | None:
    """Return the corpus that a folder holds, or None."""
    try:
        found = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        corpus = Prepared(folder=folder, **found)
    except (OSError, ValueError, TypeError):
        return None
    files = [file for part in ("train", "valid") for file in output_files(corpus.prefix(part))]
    return corpus if all(file.is_file() for file in files) else None


def prepare(folder: Path, roots: Sequence[Path], recipe: Recipe, vocab: int) -> Prepared:
    """Make the corpus of some folders of packages, or return the one that is there.

    A corpus that is there is taken wherever it was made, so that one machine can prepare what
    another trains on.

    Args:
        folder: Where it is or is to be; made if missing.
        roots: Folders of packages.
        recipe: What is taken of them.
        vocab: Token ids of its vocabulary.

    Raises:
        DataError: If the corpus that is there has another recipe or vocabulary, no corpus can be
            made, or ``tokenizers`` is not installed.
    """
    wanted = {"format": _FORMAT, **asdict(recipe)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock"), f"preparing {folder}", _WAIT_S):
        found = load(folder)
        if found is None:
            _make(folder, roots, recipe, wanted, vocab)
            found = load(folder)
    if found is None:
        raise DataError(f"{folder}: was changed by another program while it was written")
    if found.recipe != wanted or found.vocab != vocab:
        raise DataError(
            f"{folder}: holds a corpus with the recipe {found.recipe} and a vocabulary of "
            f"{found.vocab}, wanted are {wanted} and {vocab}; name another folder or remove it"
        )
    return found


def _make(
    folder: Path, roots: Sequence[Path], recipe: Recipe, wanted: dict[str, Any], vocab: int
) -> None:
    """Write a corpus beside its folder, then give it its name."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{folder}: holds no corpus, and making one needs the package tokenizers "
            f"(pip install tokenizers): {error}"
        ) from None
    corpus = collect(roots, recipe)
    hidden = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    hidden.mkdir()
    try:
        _write(corpus, hidden, list(map(str, roots)), wanted, vocab)
        shutil.rmtree(folder, ignore_errors=True)
        hidden.rename(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def learn_vocabulary(texts: Sequence[Text], vocab: int, sample: int = _SAMPLE) -> Tokenizer:
    """Return a byte-level byte-pair tokeniser learned from some documents.

    Args:
        texts: Every k-th is taken, so that about ``sample`` characters are.
        vocab: Ids, bytes and the end of a document included.
        sample: See ``texts``.

    Raises:
        DataError: If there is too little text for so many ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    every = max(1, round(sum(len(each.text) for each in texts) / sample))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((each.text for each in texts[::every]), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise DataError(
            f"the corpus has text for {tokenizer.get_vocab_size()} token ids only, wanted are "
            f"{vocab}; take more packages or a smaller vocabulary"
        )
    return tokenizer


def _write(
    corpus: Corpus, folder: Path, roots: list[str], recipe: dict[str, Any], vocab: int
) -> None:
    """Write vocabulary, token ids and description."""
    tokenizer = learn_vocabulary(corpus.train, vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    sets = {"train": corpus.train, "valid": corpus.valid}
    tokens = {}
    for part, texts in sets.items():
        with DocumentWriter(folder / f"{part}_text_document", vocab) as writer:
            _encode(texts, tokenizer, writer)
        tokens[part] = writer.tokens
    facts = {
        "recipe": recipe,
        "roots": roots,
        "vocab": vocab,
        "digest": corpus.digest(),
        "packages": corpus.packages,
        "held_out": corpus.held_out,
        "documents": {part: len(texts) for part, texts in sets.items()},
        "text_bytes": {p: sum(len(t.text.encode()) for t in texts) for p, texts in sets.items()},
        "tokens": tokens,
        "dropped": dict(corpus.dropped),
    }
    text = json.dumps(facts, indent=1) + "\n"
    (folder / "corpus.json").write_text(text, encoding="utf-8")


def _encode(texts: Sequence[Text], tokenizer: Tokenizer, writer: DocumentWriter) -> None:
    end = tokenizer.token_to_id(END)
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        for each, found in zip(
            batch, tokenizer.encode_batch_fast([each.text for each in batch]), strict=True
        ):
            writer.add(np.asarray([*found.ids, end], dtype=np.int32), each.name)
