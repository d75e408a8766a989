"""A script runs as the main module, and a module is met as soon as it is imported."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_taco.patching.after_import import AfterImport

RUN = "import sys; from megatron_taco.drop_in.script import run_script as r; r(sys.argv[1], ['a'])"


def run(script: Path, text: str) -> str:
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_is_main_with_its_folder_and_command_line(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    text = run(
        tmp_path / "train.py",
        "import pickle, sys, beside\n"
        "class Thing: pass\n"
        "print(__name__, sys.argv[1:], beside.word, __file__ == sys.argv[0])\n"
        "print(sys.modules['__main__'].Thing is Thing)\n"
        "print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)\n",
    )
    assert text == "__main__ ['a'] found True\nTrue\nTrue\n"


def test_a_spawned_process_imports_the_script_and_finds_its_functions(tmp_path: Path) -> None:
    text = run(
        tmp_path / "train.py",
        "import multiprocessing\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [2, 3]))\n",
    )
    assert text == "[4, 9]\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose `__init__` imports from its module by value."""
    name = "package_for_after_import"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .loop import train\n")
    (tmp_path / name / "loop.py").write_text("def train(): return 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[loaded]


def test_importers_by_value_get_what_was_put_in_place(package: str) -> None:
    calls = []

    def replace() -> None:
        calls.append(package)
        sys.modules[f"{package}.loop"].train = lambda: "ours"  # type: ignore[attr-defined]

    before = list(sys.meta_path)
    waiting = AfterImport(f"{package}.loop", replace).install()
    assert calls == []
    module = __import__(package)
    assert module.train() == "ours"
    assert calls == [package]
    assert sys.meta_path == before
    assert "exec_module" not in vars(module.loop.__loader__)
    AfterImport(f"{package}.loop", replace).install()
    assert len(calls) == 2, "a module that is there already is met at once"
    waiting.undo()


def test_undo_before_the_import_leaves_no_trace(package: str) -> None:
    before = list(sys.meta_path)
    AfterImport(f"{package}.loop", pytest.fail).install().undo()
    assert sys.meta_path == before
    assert __import__(package).train() == "theirs"


def test_a_refusal_comes_out_of_the_import_statement(package: str) -> None:
    def refuse() -> None:
        raise RuntimeError("not this one")

    waiting = AfterImport(f"{package}.loop", refuse).install()
    with pytest.raises(RuntimeError, match="not this one"):
        __import__(package)
    waiting.undo()
    assert waiting not in sys.meta_path


def test_a_missing_module_is_still_missing(package: str) -> None:
    waiting = AfterImport(f"{package}.nothing", pytest.fail).install()
    with pytest.raises(ModuleNotFoundError):
        __import__(f"{package}.nothing")
    waiting.undo()


def test_without_torchrun_the_launcher_makes_a_run_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print(*(os.environ[n] for n in ('RANK', 'MASTER_ADDR')))\n")
    variables = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    off = "--compression.tensor_parallel.mode=off"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_taco.launch", off, str(script)],
        env={key: value for key, value in os.environ.items() if key not in variables},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0 127.0.0.1\n"), done.stderr
