"""Tokenisers for preparing data: bytes, and Hugging Face from a local folder.

Each knows how Megatron has to be told to read its output (:meth:`megatron_arguments`), so that
the two ends cannot drift apart.
"""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_taco.data.errors import DataError

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]

# What a folder of save_pretrained() holds that can change token ids.
_HF_FILES = ("*token*.json", "vocab*", "merges*", "*.model", "*.tiktoken", "config.json")


class Tokenizer(Protocol):
    """What the writer and the embedded source need of a tokeniser."""

    @property
    def name(self) -> str:
        """Short name, safe in a file name (``bytes``, ``hf-<folder>``)."""

    @property
    def spec(self) -> str:
        """What :func:`load_tokenizer` takes to build this tokeniser again in a worker."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-document id included."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document, or None if the tokeniser has none."""

    @property
    def fingerprint(self) -> str:
        """Hex digest: two tokenisers with the same one give the same ids."""

    def encode(self, text: bytes, where: str, append_eod: bool = True) -> Tokens:
        """Encodes one document.

        Args:
            text: The document, as bytes.
            where: Its name (file, or file:line) for messages.
            append_eod: End the document with :attr:`eod`. As in Megatron's
                ``preprocess_data.py``, a document without tokens gets none.

        Returns:
            One-dimensional array of token ids, uint16 or int32.

        Raises:
            DataError: If the bytes are no valid text for this tokeniser, or an end-of-document id
                is asked for and there is none.
        """

    def megatron_arguments(self) -> dict[str, Any]:
        """The Megatron arguments (by their Python names) that read data of this tokeniser."""


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, 256 ends a document; any bytes are valid.

    Megatron offers no byte-level tokeniser on its command line; its ``NullTokenizer`` with
    ``vocab_size`` 257 has ``eod`` = 256 and no padding id, which is all that training needs.
    """

    name = "bytes"
    spec = "bytes"
    vocab_size = 257
    fingerprint = "bytes-eod256"

    @property
    def eod(self) -> int:
        """256."""
        return 256

    def encode(self, text: bytes, where: str, append_eod: bool = True) -> npt.NDArray[np.uint16]:
        """See :meth:`Tokenizer.encode`. Never raises; ``where`` is not needed."""
        size = len(text)
        tokens = np.empty(size + 1 if append_eod and size else size, dtype=np.uint16)
        tokens[:size] = np.frombuffer(text, dtype=np.uint8)
        tokens[size:] = self.eod
        return tokens

    def megatron_arguments(self) -> dict[str, Any]:
        """See :meth:`Tokenizer.megatron_arguments`."""
        return {"tokenizer_type": "NullTokenizer", "vocab_size": self.vocab_size}


class HfTokenizer:
    """A Hugging Face tokeniser in a local folder, as Megatron's HuggingFaceTokenizer reads it.

    No network is ever asked and no code of the folder is run. Token ids include what the
    tokeniser adds by itself (a BOS, for instance), as in Megatron's default.
    """

    def __init__(self, path: str | Path) -> None:
        """Loads the tokeniser.

        Args:
            path: Folder as written by ``save_pretrained``.

        Raises:
            DataError: If the folder is missing or holds no tokeniser that transformers can load.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise DataError(
                f"tokenizer hf:{path}: no such folder; a local folder is needed that holds "
                "tokenizer.json or what else save_pretrained() writes (nothing is downloaded)"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                f"tokenizer hf:{path}: the package transformers is needed "
                f"(pip install 'megatron-taco[hf]'): {error}"
            ) from error

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
            )
            self._vocab_size = len(self._tokenizer)
        # Broad on purpose: the Rust half of `tokenizers` raises bare Exception for a bad file.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"tokenizer hf:{path}: cannot be loaded: {reason}") from error
        if self._vocab_size == 0:
            raise DataError(f"tokenizer hf:{path}: the folder holds no vocabulary")
        # Megatron's wrapper takes the SEP token where there is no EOS (BERT-like vocabularies).
        end = self._tokenizer.eos_token or self._tokenizer.sep_token
        self._eod: int | None = None
        if end is not None:
            ids: Any = self._tokenizer.convert_tokens_to_ids([end])
            self._eod = int(ids[0])
        self._path = folder

    @property
    def name(self) -> str:
        """``hf-`` and the folder's name, reduced to letters, digits, ``.``, ``_`` and ``-``."""
        folder = self._path.resolve().name
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in folder)
        return f"hf-{safe}"

    @property
    def spec(self) -> str:
        """``hf:`` and the folder."""
        return f"hf:{self._path}"

    @property
    def vocab_size(self) -> int:
        """Size with added tokens, as Megatron counts it."""
        return self._vocab_size

    @property
    def eod(self) -> int | None:
        """Id of the EOS token, else of the SEP token, else None."""
        return self._eod

    @property
    def fingerprint(self) -> str:
        """Digest over names and contents of the folder's tokeniser files."""
        digest = hashlib.sha256()
        names = {p for pattern in _HF_FILES for p in self._path.glob(pattern) if p.is_file()}
        for file in sorted(names):
            content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    def encode(self, text: bytes, where: str, append_eod: bool = True) -> npt.NDArray[np.int32]:
        """See :meth:`Tokenizer.encode`.

        Raises:
            DataError: If ``text`` is not UTF-8 (the message names the byte offset), or
                ``append_eod`` is set and the tokeniser has neither EOS nor SEP.
        """
        if append_eod and self._eod is None:
            raise DataError(
                f"tokenizer {self.spec}: no EOS (or SEP) token to end documents with; set "
                "eos_token in its tokenizer_config.json or use --no-append-eod"
            )
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: not UTF-8 at byte {error.start} (0x{text[error.start]:02x}); the bytes "
                "tokenizer takes any file, or leave this one out"
            ) from None
        # verbose=False silences the "longer than the maximum" note; long documents are wanted.
        ids = self._tokenizer(decoded, verbose=False).input_ids
        if ids and append_eod:
            ids.append(self._eod)
        return np.asarray(ids, dtype=np.int32)

    def megatron_arguments(self) -> dict[str, Any]:
        """See :meth:`Tokenizer.megatron_arguments`."""
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(self._path)}


def load_tokenizer(spec: str) -> Tokenizer:
    """Builds the tokeniser that a command line or a configuration names.

    Args:
        spec: ``bytes`` or ``hf:PATH``.

    Raises:
        DataError: If ``spec`` is neither, or the folder cannot be loaded.
    """
    if spec == "bytes":
        return ByteTokenizer()
    kind, _, path = spec.partition(":")
    if kind == "hf" and path:
        return HfTokenizer(path)
    raise DataError(f"tokenizer {spec!r}: allowed are 'bytes' and 'hf:PATH' (a local folder)")
