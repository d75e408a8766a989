"""The pipeline of ``prepare-data``: files to documents to tokens to ``.bin`` / ``.idx``."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from megatron_taco.data.errors import DataError
from megatron_taco.data.readers import Document, read_documents
from megatron_taco.data.split import held_out
from megatron_taco.data.tokenizers import Tokenizer, Tokens, load_tokenizer
from megatron_taco.data.writer import DocumentWriter

_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 256


@dataclass(slots=True)
class Report:
    """What a run of :func:`prepare` did.

    Attributes:
        prefixes: Dataset prefixes written: one, or training and validation.
        documents: Documents per prefix, empty ones included.
        tokens: Tokens per prefix, end-of-document ids included.
        empty_documents: Documents without any token.
        text_bytes: Bytes of text read (after decompression and JSON decoding).
        seconds: From the first document read to the last one written.
    """

    prefixes: list[Path]
    documents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    empty_documents: int = 0
    text_bytes: int = 0
    seconds: float = 0.0


def dataset_prefixes(output: Path, key: str, valid_fraction: float) -> list[Path]:
    """The prefixes a run writes, named as Megatron's ``preprocess_data.py`` names its own.

    Args:
        output: The ``--output`` prefix.
        key: The JSON key, part of the name.
        valid_fraction: With 0 there is one prefix, ``OUTPUT_<key>_document``; otherwise
            ``OUTPUT_train_<key>_document`` and ``OUTPUT_valid_<key>_document``.
    """
    sets = ("",) if valid_fraction == 0 else ("_train", "_valid")
    return [output.with_name(f"{output.name}{part}_{key}_document") for part in sets]


def prepare(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    append_eod: bool = True,
    workers: int = 1,
    valid_fraction: float = 0.0,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda consumed: None,
) -> Report:
    """Writes the documents of ``files``, in order, as Megatron datasets.

    Memory is bounded by the largest document (about 7 bytes a byte of text with the bytes
    tokeniser) and, with workers, by two chunks of about 1 MiB of text for each. The result does
    not depend on ``workers``. With ``valid_fraction``, a document goes to training or validation
    by a hash of its text, so identical documents never lie on both sides.

    Args:
        files: As listed by :func:`megatron_taco.data.readers.find_files`.
        output: Prefix; see :func:`dataset_prefixes`.
        tokenizer: Encodes the documents.
        key: The field of JSON lines that holds the text.
        append_eod: End every non-empty document with the tokeniser's end-of-document id.
        workers: Processes that encode; 1 encodes in this one.
        valid_fraction: Share of documents held out for validation, 0 <= fraction < 1.
        overwrite: Replace existing datasets.
        progress: Called with the bytes of input consumed since the last call.

    Raises:
        DataError: For unusable input or output. Nothing is left under the final names then.
    """
    prefixes = dataset_prefixes(output, key, valid_fraction)
    report = Report(prefixes)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(DocumentWriter(prefix, tokenizer.vocab_size, overwrite))
            for prefix in prefixes
        ]
        started = time.monotonic()  # after Megatron's import, which takes seconds
        documents = (document for file in files for document in read_documents(file, key))
        if workers == 1:
            encoded = _encode_here(documents, tokenizer, append_eod)
        else:
            encoded = _encode_in_pool(documents, tokenizer.spec, append_eod, workers)
        with closing(encoded):
            for document, tokens in encoded:
                valid = valid_fraction > 0 and held_out(document.text, valid_fraction)
                writers[valid].add(tokens, document.where)
                report.text_bytes += len(document.text)
                progress(document.consumed)
        report.seconds = time.monotonic() - started
        _refuse_empty_set(writers, valid_fraction)
    report.documents = [writer.documents for writer in writers]
    report.tokens = [writer.tokens for writer in writers]
    report.empty_documents = sum(writer.empty_documents for writer in writers)
    return report


def _refuse_empty_set(writers: Sequence[DocumentWriter], valid_fraction: float) -> None:
    total = sum(writer.documents for writer in writers)
    if sum(writer.tokens for writer in writers) == 0:
        raise DataError(f"the input has no text: {total} document(s), all of them empty")
    for writer, name in zip(writers, ("training", "validation"), strict=False):
        if writer.tokens == 0:
            raise DataError(
                f"--valid-fraction {valid_fraction:g} leaves no text for {name} with {total} "
                "document(s); give more documents or another fraction, or leave it out and let "
                "Megatron split inside documents (its --split argument)"
            )


def _encode_here(
    documents: Iterator[Document], tokenizer: Tokenizer, append_eod: bool
) -> Generator[tuple[Document, Tokens]]:
    for document in documents:
        yield document, tokenizer.encode(document.text, document.where, append_eod)


def _encode_in_pool(
    documents: Iterator[Document], spec: str, append_eod: bool, workers: int
) -> Generator[tuple[Document, Tokens]]:
    """Encodes chunks in worker processes and yields them in order, two chunks a worker ahead."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    pending: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()

    def finished() -> Iterator[tuple[Document, Tokens]]:
        chunk, future = pending.popleft()
        yield from zip(chunk, future.result(), strict=True)

    try:
        for chunk in _chunks(documents):
            pending.append((chunk, pool.submit(_encode_chunk, chunk, spec, append_eod)))
            if len(pending) >= 2 * workers:
                yield from finished()
        while pending:
            yield from finished()
    except BrokenProcessPool as error:
        raise DataError("a worker process died (out of memory?); use fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the pool
    # The processes are the parallelism; a thread pool in each would only compete with it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@cache  # loaded once in each worker process
def _worker_tokenizer(spec: str) -> Tokenizer:
    return load_tokenizer(spec)


def _encode_chunk(chunk: list[Document], spec: str, append_eod: bool) -> list[Tokens]:
    tokenizer = _worker_tokenizer(spec)
    return [tokenizer.encode(item.text, item.where, append_eod) for item in chunk]
