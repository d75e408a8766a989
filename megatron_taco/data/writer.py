"""Atomic writing of Megatron's indexed dataset (``PREFIX.bin`` and ``PREFIX.idx``)."""

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megatron_taco.data.errors import DataError
from megatron_taco.data.tokenizers import Tokens

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_MAX_TOKENS = 2**31 - 1  # sequence lengths are int32 in the .idx


def output_files(prefix: Path) -> tuple[Path, Path]:
    """The ``.bin`` and ``.idx`` of a prefix (whose own dots are kept)."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class DocumentWriter:
    """Context manager that writes one document at a time and publishes only a whole dataset.

    Everything goes through Megatron's own ``IndexedDatasetBuilder`` into hidden files beside the
    target; they take the final names when the ``with`` block ends without an error and are
    removed otherwise. A document without tokens is an entry of the document index with no
    sequence, as Megatron's ``preprocess_data.py`` writes it.
    """

    def __init__(self, prefix: Path, vocab_size: int, overwrite: bool = False) -> None:
        """Checks the target; writes nothing yet.

        Args:
            prefix: Path without suffix; its folder is made if missing.
            vocab_size: Decides the width of a token (Megatron's ``DType.optimal_dtype``: uint16
                below 65,500, else int32).
            overwrite: Replace an existing dataset.

        Raises:
            DataError: If a file of the dataset exists and ``overwrite`` is not set. The end of
                the ``with`` block raises it too, if no token was written at all (Megatron cannot
                map an empty ``.bin``).
        """
        self.prefix = prefix
        self.documents = 0
        self.empty_documents = 0
        self.tokens = 0
        self._vocab_size = vocab_size
        self._final = output_files(prefix)
        hidden = prefix.with_name(f".{prefix.name}.tmp-{os.getpid()}")
        self._temporary = output_files(hidden)
        self._builder: IndexedDatasetBuilder | None = None
        if not overwrite:
            for file in self._final:
                if file.exists():
                    raise DataError(f"{file}: exists already; --overwrite replaces it")

    def __enter__(self) -> Self:
        """Opens the hidden ``.bin``."""
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        folder = self.prefix.parent
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder}: is a file; output needs a folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(
                str(self._temporary[0]), dtype=DType.optimal_dtype(self._vocab_size)
            )
        except OSError as error:
            raise DataError(f"{folder}: cannot write: {error.strerror}") from error
        return self

    def add(self, tokens: Tokens, where: str) -> None:
        """Appends one document.

        Args:
            tokens: Its ids, one-dimensional; may be empty.
            where: Its name, for messages.

        Raises:
            DataError: If the document is too long for the format, or the disk refuses.
        """
        if self._builder is None:
            raise RuntimeError("DocumentWriter.add() outside its with block")
        size = tokens.size
        if size > _MAX_TOKENS:
            raise DataError(f"{where}: {size} tokens; a document may have at most {_MAX_TOKENS}")
        try:
            self._builder.add_document(tokens, [size] if size else [])
        except OSError as error:
            raise DataError(f"{self._final[0]}: cannot write: {error.strerror}") from error
        self.documents += 1
        self.empty_documents += size == 0
        self.tokens += size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publishes the dataset, or removes what was written if the block failed."""
        if self._builder is None:
            return
        builder, self._builder = self._builder, None
        try:
            if kind is None:
                self._publish(builder)
        finally:
            builder.data_file.close()
            for file in self._temporary:
                file.unlink(missing_ok=True)

    def _publish(self, builder: "IndexedDatasetBuilder") -> None:
        if self.tokens == 0:
            raise DataError(
                f"{self.prefix}: nothing to write: {self.documents} document(s) without any token"
            )
        try:
            builder.finalize(str(self._temporary[1]))
            # The old index goes first and the new one comes last: at no moment does an index
            # stand beside a .bin that is not its own.
            self._final[1].unlink(missing_ok=True)
            for temporary, final in zip(self._temporary, self._final, strict=True):
                os.replace(temporary, final)
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot write: {error.strerror}") from error
