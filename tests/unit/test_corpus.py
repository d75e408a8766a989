"""The corpus of installed packages: what is taken, what is dropped, what is held out."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_taco.data import DataError
from megatron_taco.lab.corpus import Corpus, Recipe, collect
from megatron_taco.lab.corpus_tokens import END, prepare

RECIPE = Recipe(held_out=0.2, package=0.15)


def prose(topic: str, lines: int = 12) -> str:
    """Text in which every line is one of its own."""
    return "".join(f"{topic} is told in line {n} of the text on {topic}.\n" for n in range(lines))


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    files: dict[str, str | bytes] = {
        f"package{n}/__init__.py": prose(f"thing{n}") for n in range(9)
    }
    return write(tmp_path / "site", files)


def names(corpus: Corpus, part: str) -> set[str]:
    return {Path(each.name).name for each in getattr(corpus, part)}


def test_whole_packages_are_held_out(packages: Path) -> None:
    write(packages, {f"package{n}/more.py": prose(f"more{n}") for n in range(9)})
    corpus = collect([packages], RECIPE)
    assert corpus.packages == 9
    assert 1 <= len(corpus.held_out) < 9
    assert {each.package for each in corpus.valid} == set(corpus.held_out)
    assert not {each.package for each in corpus.train} & set(corpus.held_out)
    assert len(corpus.train) + len(corpus.valid) == 18
    assert len(corpus.valid) == 2 * len(corpus.held_out)


def test_a_large_package_is_not_held_out(packages: Path) -> None:
    largest = {f"large/part{n}.py": prose(f"part{n}", 100) for n in range(5)}
    corpus = collect([write(packages, largest)], Recipe(held_out=0.9, package=0.05))
    assert "large" not in corpus.held_out
    assert len(corpus.held_out) == 9


def test_text_that_repeats_other_text_is_dropped(packages: Path) -> None:
    header = "".join(f"# Line {n} of a licence that stands in every file.\n" for n in range(4))
    own = {f"package{n}/licensed.py": header + prose(f"licensed{n}") for n in range(9)}
    mostly = prose("thing3", 11) + "Only this line is new here, all else is known.\n"
    write(packages, {**own, "copies/same.py": prose("thing1").replace("\n", "\r\n")})
    corpus = collect([write(packages, {"copies/most.py": mostly})], RECIPE)
    assert not {"same.py", "most.py"} & (names(corpus, "train") | names(corpus, "valid"))
    assert corpus.dropped == {"same text": 1, "same lines": 1}
    assert len(corpus.train) + len(corpus.valid) == 18


def test_what_is_held_out_is_nowhere_in_the_training_text(packages: Path) -> None:
    """Packages have copies of others' text, as those that vendor what they need."""
    texts = {n: (packages / f"package{n}/__init__.py").read_text() for n in range(9)}
    for n in range(9):
        vendored = {f"package{n}/vendored{m % 9}.py": texts[m % 9] for m in (n + 1, n + 2)}
        write(packages, vendored)
    corpus = collect([packages], RECIPE)
    known = {line for each in corpus.train for line in each.text.splitlines()}
    assert corpus.valid
    for each in corpus.valid:
        assert not known & set(each.text.splitlines())


def test_only_text_that_a_person_may_have_written(packages: Path) -> None:
    odd: dict[str, str | bytes] = {
        "odd/short.py": "x = 1\n",
        "odd/table.py": "1, " * 10_000,
        "odd/latin.py": prose("café").encode("latin-1"),
        "odd/zero.txt": prose("zero") + "\0",
        "odd/large.py": prose("large", 20_000),
        "odd/code.so": prose("library"),
        "odd.dist-info/METADATA": prose("metadata"),
    }
    corpus = collect([write(packages, odd)], RECIPE)
    assert corpus.dropped == {"size": 2, "long lines": 1, "no UTF-8": 2}
    found = names(corpus, "train") | names(corpus, "valid")
    assert found == {"__init__.py", "METADATA"}
    assert corpus.packages == 10  # odd and its description are one package


def test_the_same_folders_give_the_same_corpus(packages: Path) -> None:
    first, again = collect([packages], RECIPE), collect([packages], RECIPE)
    assert first.digest() == again.digest()
    inner = collect([packages, packages / "package3"], RECIPE)
    assert len(inner.train) + len(inner.valid) == 9  # once each
    size = (packages / "package0/__init__.py").stat().st_size
    part = collect([packages], Recipe(held_out=0.2, package=0.3, limit=5 * size))
    assert part.packages == 5
    write(packages, {"package3/__init__.py": prose("changed")})
    assert collect([packages], RECIPE).digest() != first.digest()


def test_too_little_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "site", {"one/__init__.py": prose("one")})
    with pytest.raises(DataError, match="name folders with more packages"):
        collect([root], RECIPE)


def test_tokens_are_prepared_once(packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    made = prepare(folder, [packages], RECIPE, 280)
    assert made.tokens["train"] > made.tokens["valid"] > 0
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.fromfile(made.prefix("valid").with_suffix(".bin"), dtype=np.uint16)
    ends = np.flatnonzero(ids == tokenizer.token_to_id(END))
    assert len(ends) == made.documents["valid"] == len(made.held_out)
    corpus = collect([packages], RECIPE)
    assert tokenizer.decode(ids[: ends[0]].tolist()) == corpus.valid[0].text
    assert made.digest == corpus.digest()
    for file in packages.rglob("*.py"):
        file.unlink()  # a corpus that is there is not made again
    assert prepare(folder, [packages], RECIPE, 280) == made
    with pytest.raises(DataError, match="a vocabulary of 280, wanted"):
        prepare(folder, [packages], RECIPE, 400)
    (folder / "corpus.json").write_text(json.dumps({"recipe": {}}))
    with pytest.raises(DataError, match="name folders with more packages"):
        prepare(folder, [packages], RECIPE, 280)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token ids only, wanted are 5000"):
        prepare(tmp_path / "corpus", [packages], RECIPE, 5000)
    assert not (tmp_path / "corpus").exists()
