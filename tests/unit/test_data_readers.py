"""Finding files, and reading documents out of them."""

import gzip
import json
from pathlib import Path

import pytest

from megatron_taco.data import DataError
from megatron_taco.data.readers import find_files, read_documents


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = "b.py a.txt sub/z.py sub/a.py a/x.md .git/config.txt sub/__pycache__/m.py x.bin .h.py"
    for name in names.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def relative(files: list[Path], root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in files]


def test_folders_are_walked_in_order(tree: Path) -> None:
    found = relative(find_files([tree]), tree)
    assert found == ["a/x.md", "a.txt", "b.py", "sub/a.py", "sub/z.py"]


def test_include_selects(tree: Path) -> None:
    assert relative(find_files([tree], ["*.py"]), tree) == ["b.py", "sub/a.py", "sub/z.py"]
    assert relative(find_files([tree], ["sub/*"]), tree) == ["sub/a.py", "sub/z.py"]
    assert relative(find_files([tree], ["*.bin"]), tree) == ["x.bin"]


def test_inputs_keep_their_order(tree: Path) -> None:
    inputs = [tree / "sub", tree / "a.txt"]
    assert relative(find_files(inputs), tree) == ["sub/a.py", "sub/z.py", "a.txt"]


def test_what_cannot_be_read_is_refused(tree: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt: no such file or folder"):
        find_files([tree / "nothing.txt"])
    with pytest.raises(DataError, match=r"x\.bin: do not know how to read a \.bin file"):
        find_files([tree / "x.bin"])
    with pytest.raises(DataError, match=r"no documents found \(looked for \*\.nope\)"):
        find_files([tree], ["*.nope"])
    assert find_files([tree / "x.bin"], ["x.bin"]) == [tree / "x.bin"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"two\r\nlines\n\xff")
    (document,) = read_documents(file)
    assert (document.where, document.text) == (str(file), b"two\r\nlines\n\xff")
    assert document.consumed == 12


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    texts = ["plain", "", "é ☃ \U0001d11e \n \u2028 \x00", "x" * 100_000]
    lines = [json.dumps({"body": t, "n": 1}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    content = ("\n".join(lines) + "\n \n").encode()  # a blank line is no document
    file = tmp_path / f"in{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    documents = list(read_documents(file, "body"))
    assert [d.text.decode() for d in documents] == texts
    assert [d.where for d in documents] == [f"{file}:{line}" for line in range(1, 5)]
    assert 0 < sum(d.consumed for d in documents) <= file.stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "invalid JSON at column 13"),
        (b'["a"]', "a JSON object is needed, found a list"),
        (b"null", "a JSON object is needed, found null"),
        (b'{"body": "a", "id": 3}', "no key 'text' .*keys of this line: body, id"),
        (b'{"text": 7}', "'text' has to be a string, found a number"),
        (b'{"text": ["a"]}', "'text' has to be a string, found a list"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
        (b'{"text": "a\\ud800"}', "'text' holds half of a surrogate pair at character 1"),
        (b"[" * 100_000, "invalid JSON: nested too deeply"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"in\.jsonl:2: {message}"):
        list(read_documents(file))


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    for content in (whole[:-20], b"no archive", whole[:20] + b"\xff" * 9 + whole[29:]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"in\.jsonl\.gz: cannot be read: "):
            list(read_documents(file))
