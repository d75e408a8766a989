"""Writing .bin / .idx: against Megatron's reader and against the format written out by hand."""

import argparse
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.cli.prepare_data import add_arguments, run
from megatron_taco.data import ByteTokenizer, DataError
from megatron_taco.data.prepare import prepare
from megatron_taco.data.split import held_out
from megatron_taco.data.writer import DocumentWriter
from tests.unit.test_data_tokenizers import save_hf_tokenizer

BYTES = ByteTokenizer()


def cli(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(a) for a in arguments]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_back(prefix: Path) -> list[bytes]:
    """Documents of a byte dataset, by Megatron's reader and its document index."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    starts = dataset.document_indices.tolist()
    documents = []
    for first, end in itertools.pairwise(starts):
        ids = [t for i in range(first, end) for t in dataset[i].tolist()]
        assert 256 not in ids[:-1]
        assert not ids or ids[-1] == 256
        documents.append(bytes(ids[:-1]))
    return documents


def dataset_by_hand(documents: list[list[int]], code: int, dtype: str) -> tuple[bytes, bytes]:
    """The two files, from the format alone: little-endian, empty documents have no sequence."""
    sequences = [d for d in documents if d]
    ends = np.cumsum([0] + [1 if d else 0 for d in documents])
    lengths = np.array([len(s) for s in sequences], dtype="<i4")
    sizes = lengths.astype("<i8") * np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype("<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    index = header + lengths.tobytes() + pointers.tobytes() + ends.astype("<i8").tobytes()
    return b"".join(np.array(s, dtype=dtype).tobytes() for s in sequences), index


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_documents_round_trip(
    tmp_path_factory: pytest.TempPathFactory, documents: list[bytes]
) -> None:
    prefix = tmp_path_factory.mktemp("round") / "data"

    def write() -> None:
        with DocumentWriter(prefix, BYTES.vocab_size) as writer:
            for text in documents:
                writer.add(BYTES.encode(text, "doc"), "doc")

    if not any(documents):
        with pytest.raises(DataError, match="nothing to write"):
            write()
        assert names(prefix.parent) == []
        return
    write()
    assert read_back(prefix) == documents
    expected = dataset_by_hand([[*d, 256] if d else [] for d in documents], 8, "<u2")
    assert (prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()) == (
        expected
    )
    assert names(prefix.parent) == ["data.bin", "data.idx"]


def test_large_vocabularies_are_written_as_int32(tmp_path: Path) -> None:
    documents = [[1, 70_000], [2]]
    with DocumentWriter(tmp_path / "v1.5", vocab_size=100_000) as writer:
        for ids in documents:
            writer.add(np.array(ids, dtype=np.int32), "doc")
    written = ((tmp_path / "v1.5.bin").read_bytes(), (tmp_path / "v1.5.idx").read_bytes())
    assert written == dataset_by_hand(documents, 4, "<i4")


def test_all_kinds_of_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "deep" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "src" / "b.py").write_bytes(b"\xff\x00")
    (tmp_path / "src" / "empty.py").touch()
    (tmp_path / "one.txt").write_bytes(b"one\ndocument")
    (tmp_path / "lines.jsonl").write_text('{"text": "l1"}\n{"text": "l2"}\n')
    inputs = [tmp_path / name for name in ("lines.jsonl", "src", "one.txt")]
    assert cli(*inputs, "--output", tmp_path / "out" / "data") == 0
    texts = [b"l1", b"l2", b"\xff\x00", b"a = 1\n", b"", b"one\ndocument"]
    assert read_back(tmp_path / "out" / "data_text_document") == texts
    shown = capsys.readouterr().out
    assert "6 documents, 29 tokens" in shown
    assert "1 of the documents are empty" in shown
    assert "24 bytes of text" in shown
    assert "--tokenizer-type NullTokenizer --vocab-size 257" in shown


def test_jsonl_key_and_no_eod(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "ab"}\n{"body": ""}\n{"body": "c"}\n')
    arguments = ["--jsonl-key", "body", "--no-append-eod"]
    assert cli(tmp_path / "in.jsonl", "--output", tmp_path / "d", *arguments) == 0
    expected = dataset_by_hand([[97, 98], [], [99]], 8, "<u2")
    written = [(tmp_path / f"d_body_document.{end}").read_bytes() for end in ("bin", "idx")]
    assert written == list(expected)


def test_workers_change_nothing(tmp_path: Path) -> None:
    texts = ["a b", "", "c", "déjà"] * 200  # more than one chunk of documents
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    assert cli(tmp_path / "in.jsonl", "--output", tmp_path / "d", "--workers", "2") == 0
    expected = dataset_by_hand([[*t.encode(), 256] if t else [] for t in texts], 8, "<u2")
    written = [(tmp_path / f"d_text_document.{end}").read_bytes() for end in ("bin", "idx")]
    assert written == list(expected)


def test_hf_tokenizer(tmp_path: Path) -> None:
    folder = save_hf_tokenizer(tmp_path / "tok", eos_token="<end>")
    (tmp_path / "in.jsonl").write_text('{"text": "a b"}\n{"text": ""}\n{"text": "c what"}\n')
    arguments: list[str | Path] = ["--output", tmp_path / "d", "--tokenizer", f"hf:{folder}"]
    assert cli(tmp_path / "in.jsonl", *arguments) == 0
    expected = dataset_by_hand([[2, 3, 1], [], [4, 0, 1]], 8, "<u2")
    written = [(tmp_path / f"d_text_document.{end}").read_bytes() for end in ("bin", "idx")]
    assert written == list(expected)


def test_an_error_in_a_worker_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_hf_tokenizer(tmp_path / "tok", eos_token="<end>")
    (tmp_path / "bad.txt").write_bytes(b"a \xff")
    arguments = ["--tokenizer", f"hf:{folder}", "--workers", "2"]
    assert cli(tmp_path / "bad.txt", "--output", tmp_path / "d", *arguments) == 2
    assert "bad.txt: not UTF-8 at byte 2 (0xff)" in capsys.readouterr().err
    assert names(tmp_path) == ["bad.txt", "tok"]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12),
    st.floats(0.05, 0.95),
)
def test_held_out_documents_are_disjoint_and_complete(
    tmp_path_factory: pytest.TempPathFactory, documents: list[bytes], fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("split")
    files = []
    for number, text in enumerate(documents):
        files.append(folder / f"{number}.txt")
        files[-1].write_bytes(text)
    sides = {held_out(text, fraction) for text in documents}
    if len(sides) == 1:
        with pytest.raises(DataError, match="leaves no text for"):
            prepare(files, folder / "d", BYTES, valid_fraction=fraction)
        assert names(folder) == sorted(file.name for file in files)
        return
    report = prepare(files, folder / "d", BYTES, valid_fraction=fraction)
    train, valid = (read_back(prefix) for prefix in report.prefixes)
    assert sorted(train + valid) == sorted(documents)
    assert not set(train) & set(valid)
    assert report.documents == [len(train), len(valid)]


def test_held_out_share_is_about_the_fraction(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(4000))
    (tmp_path / "in.jsonl").write_text(lines)
    report = prepare([tmp_path / "in.jsonl"], tmp_path / "d", BYTES, valid_fraction=0.1)
    assert report.prefixes[1] == tmp_path / "d_valid_text_document"
    # Binomial(4000, 0.1): standard deviation 19, so within five of them.
    assert abs(report.documents[1] - 400) < 95


def test_existing_output_needs_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    prefix = tmp_path / "d_text_document"
    source.write_bytes(b"old")
    assert cli(source, "--output", tmp_path / "d") == 0
    source.write_bytes(b"new")
    assert cli(source, "--output", tmp_path / "d") == 2
    assert "d_text_document.bin: exists already; --overwrite" in capsys.readouterr().err
    assert read_back(prefix) == [b"old"]
    assert cli(source, "--output", tmp_path / "d", "--overwrite") == 0
    assert read_back(prefix) == [b"new"]


def test_an_interrupted_run_leaves_the_old_dataset_and_no_other_file(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "old"}\n')
    assert cli(source, "--output", tmp_path / "d") == 0
    before = names(tmp_path)

    def interrupt(consumed: int) -> None:
        assert any(name.startswith(".d_text_document.tmp-") for name in names(tmp_path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "d", BYTES, overwrite=True, progress=interrupt)
    assert names(tmp_path) == before
    source.write_text('{"text": "new"}\n{"text": 3}\n')
    assert cli(source, "--output", tmp_path / "d", "--overwrite") == 2
    assert names(tmp_path) == before
    assert read_back(tmp_path / "d_text_document") == [b"old"]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", [], "the input has no text: 1 document(s), all of them empty"),
        (b"x", ["--valid-fraction", "1e-9"], "leaves no text for validation with 1 document(s)"),
        (b"x", ["--tokenizer", "gpt2"], "tokenizer 'gpt2': allowed are"),
        (b"x", ["--output", "{input}/d"], "in.txt: is a file; output needs a folder"),
    ],
)
def test_unusable_input_is_one_message_and_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "in.txt").write_bytes(content)
    source = tmp_path / "in.txt"
    given: list[str | Path] = [argument.format(input=source) for argument in arguments]
    assert cli(source, "--output", tmp_path / "d", *given) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.splitlines()[-1].startswith("megatron-taco prepare-data: ")
    assert "Traceback" not in shown.err
    assert names(tmp_path) == ["in.txt"]


@pytest.mark.parametrize("bad", ["--workers=0", "--valid-fraction=1", "--valid-fraction=-0.1"])
def test_bad_numbers_are_refused_by_the_parser(bad: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli("in.txt", "--output", "d", bad)
    assert stop.value.code == 2


def test_import_is_light() -> None:
    code = (
        "import sys, megatron_taco.cli.prepare_data, megatron_taco.data.prepare, "
        "megatron_taco.data.stdlib; "
        "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
