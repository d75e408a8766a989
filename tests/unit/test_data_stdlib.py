"""The embedded source: what is in it, its cache, and processes that want it at once."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.data import ByteTokenizer, DataError, stdlib
from megatron_taco.data.locking import file_lock
from megatron_taco.data.writer import DocumentWriter
from tests.unit.test_data_prepare import read_back

BYTES = ByteTokenizer()


def make_tree(root: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    contents = {f"pkg{i % 3}/mod{i}.py": f"x = {i}\n".encode() for i in range(60)}
    return make_tree(tmp_path / "lib", contents | {"pkg0/__init__.py": b""})


def test_the_real_standard_library(tmp_path: Path) -> None:
    data = stdlib.prepare(tmp_path, BYTES)
    train, valid = read_back(data.train_prefix), read_back(data.valid_prefix)
    assert len(train) + len(valid) == data.documents > 400
    assert sum(map(len, train + valid)) + data.documents == data.tokens > 5_000_000
    assert len(valid) == data.valid_documents
    assert 0.01 < data.valid_documents / data.documents < 0.12
    assert data.valid_tokens == sum(map(len, valid)) + len(valid)
    assert Path(threading.__file__).read_bytes() in train + valid
    assert stdlib.prepare(tmp_path, BYTES) == data


def test_tests_packages_and_build_files_are_left_out(tmp_path: Path) -> None:
    names = ["os.py", "json/tool.py", "testing/x.py", "config/y.py"]
    left_out = (
        "test/a.py site-packages/b.py dist-packages/c.py ctypes/tests/d.py idlelib/idle_test/e.py "
        "__pycache__/f.py config-3.12-linux/g.py _sysconfigdata__linux_.py sitecustomize.py h.txt"
    )
    make_tree(tmp_path, dict.fromkeys([*names, *left_out.split()], b"x"))
    assert stdlib.source_files(tmp_path) == sorted(names)


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 10_000).map("m{}.py".format), st.binary(max_size=30), min_size=25
    )
)
def test_sets_are_disjoint_and_complete(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    root = make_tree(folder / "lib", contents)
    expected: dict[bool, list[bytes]] = {False: [], True: []}
    for name in sorted(contents):
        if contents[name]:
            expected[stdlib.is_validation(name)].append(contents[name])
    if not expected[False] or not expected[True]:
        with pytest.raises(DataError, match="nothing to write"):
            stdlib.prepare(folder / "cache", BYTES, root=root)
        return
    data = stdlib.prepare(folder / "cache", BYTES, root=root)
    assert read_back(data.train_prefix) == expected[False]
    assert read_back(data.valid_prefix) == expected[True]


def test_digest_follows_contents_alone(tmp_path: Path, tree: Path) -> None:
    first = stdlib.prepare(tmp_path / "one", BYTES, root=tree)
    assert stdlib.prepare(tmp_path / "two", BYTES, root=tree).digest == first.digest
    (tree / "pkg1" / "mod1.py").write_bytes(b"x = 9\n")  # same size
    changed = stdlib.prepare(tmp_path / "one", BYTES, root=tree)
    assert changed.digest != first.digest
    assert changed.train_prefix.parent != first.train_prefix.parent


def test_a_damaged_cache_is_built_again(tmp_path: Path, tree: Path) -> None:
    data = stdlib.prepare(tmp_path / "cache", BYTES, root=tree)
    file = data.train_prefix.with_name(data.train_prefix.name + ".bin")
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    assert stdlib.prepare(tmp_path / "cache", BYTES, root=tree) == data
    assert file.read_bytes() == whole


def test_a_failed_build_leaves_nothing(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DocumentWriter, tokens: object, where: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DocumentWriter, "add", fail)
        with pytest.raises(KeyboardInterrupt):
            stdlib.prepare(tmp_path / "cache", BYTES, root=tree)
    (lock,) = (tmp_path / "cache").iterdir()
    assert lock.name.endswith(".lock")
    stale = lock.with_name(lock.name.removesuffix(".lock") + ".tmp-1")  # of a killed process
    stale.mkdir()
    data = stdlib.prepare(tmp_path / "cache", BYTES, root=tree)
    assert data.documents == 60
    assert not stale.exists()


def test_callers_at_the_same_time_build_once(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = []
    build = stdlib._build

    def counted(root: Path, names: list[str], target: Path, *rest: object) -> None:
        builds.append(target)
        build(root, names, target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(stdlib, "_build", counted)
    results: list[stdlib.EmbeddedData] = []
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        results.append(stdlib.prepare(tmp_path / "cache", BYTES, root=tree))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert results == [results[0]] * 4


def test_other_processes_wait_and_build_nothing(tmp_path: Path, tree: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        "import sys; from pathlib import Path;"
        "from megatron_taco.data import ByteTokenizer, stdlib;"
        "print('ready', flush=True);"
        "d = stdlib.prepare(Path(sys.argv[1]), ByteTokenizer(), root=Path(sys.argv[2]));"
        "print(d.digest, d.tokens, 'megatron.core' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(cache), str(tree)]
    built = stdlib.prepare(cache, BYTES, root=tree)
    target = built.train_prefix.parent
    hidden = target.rename(tmp_path / "hidden")
    with file_lock(cache / f".{target.name}.lock", "the test", 1):
        waiting = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in waiting:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting[0].wait(0.3)  # it does wait for the lock
        hidden.rename(target)
    for process in waiting:
        shown, _ = process.communicate(timeout=30)
        assert shown.split() == [built.digest, str(built.tokens), "False"]


def test_waiting_ends_with_the_holder_named(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with (
        file_lock(lock, "first", 1),
        pytest.raises(DataError, match=r"second: waited 0\.1 s for process \d+, which holds .*x"),
        file_lock(lock, "second", 0.1),
    ):
        pass
    with file_lock(lock, "third", 0):
        assert lock.exists()


def test_interpreters_without_sources_are_refused(tmp_path: Path) -> None:
    make_tree(tmp_path, {"os.pyc": b"x"})
    with pytest.raises(DataError, match=r"python-stdlib: no \.py files"):
        stdlib.prepare(tmp_path / "cache", BYTES, root=tmp_path)
    with pytest.raises(DataError, match="python-stdlib: no"):
        stdlib.prepare(tmp_path / "cache", BYTES, root=tmp_path / "absent")
