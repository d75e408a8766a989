"""The launcher of ranks: exit codes, and that nothing that a rank started is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_taco.lab import launch as launching
from megatron_taco.lab.launch import Place, command_line, launch
from megatron_taco.lab.signals import Caught
from tests.processes import marked, wait_until

TWO = [Place(environment={"RANK": "0"}), Place(environment={"RANK": "1"})]
CHILDREN = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
open(os.path.join(sys.argv[2], os.environ["RANK"]), "w").close()
while len(os.listdir(sys.argv[2])) < 2: time.sleep(0.02)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "AFTER_FAILURE_S", 0.5)


def _python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_every_rank_has_its_environment(tmp_path: Path) -> None:
    code = (
        "import os, sys; open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write("
        "os.environ['ALL'] + str(os.isatty(0)))"
    )
    places = [Place(environment={"RANK": str(r), "ALL": "x"}) for r in range(3)]
    assert launch(_python(code, str(tmp_path)), places) == 0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict.fromkeys("012", "xFalse")


def test_the_first_failure_is_the_exit_code(quick: None, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, time, sys; r = int(os.environ['RANK']); time.sleep(r * 0.2); sys.exit(r + 3)"
    assert launch(_python(code), TWO) == 3
    assert "rank 0" in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_killed_rank_ends_the_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The other rank is killed after a while, and what both had started with them."""
    code = CHILDREN + "time.sleep(600 * int(os.environ['RANK'])); os.kill(os.getpid(), 9)"
    marker = f"lab-launch-{os.getpid()}-killed"
    start = time.monotonic()
    assert launch(_python(code, marker, str(tmp_path)), TWO) == 128 + signal.SIGKILL
    assert time.monotonic() - start < 20
    assert wait_until(lambda: not marked(marker))
    err = capfd.readouterr().err
    assert "rank 0" in err
    assert "SIGKILL" in err
    assert "killed rank 1" in err


def test_children_of_a_rank_that_ended_well_are_killed_too(tmp_path: Path) -> None:
    marker = f"lab-launch-{os.getpid()}-well"
    assert launch(_python(CHILDREN, marker, str(tmp_path)), TWO) == 0
    assert wait_until(lambda: not marked(marker))


def test_a_timeout_is_124() -> None:
    assert launch(_python("import time; time.sleep(600)"), TWO, timeout_s=0.3) == 124


def test_a_program_that_is_not_there(quick: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["no-such-program"], TWO) == 1
    assert "no-such-program: cannot be run" in capfd.readouterr().err


def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    marker = f"lab-launch-{os.getpid()}-orphan"
    rank = "import sys, time; print('up', flush=True); time.sleep(600)"
    code = (
        "import sys; from megatron_taco.lab.launch import Place, launch\n"
        f"launch([sys.executable, '-c', {rank!r}, {marker!r}], [Place(environment={{}})])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert wait_until(lambda: not marked(marker))


def test_a_signal_is_passed_on_and_handlers_come_back(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
def end(*_):
    (folder / f"ended{rank}").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
(folder / f"ready{rank}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.02)
if rank == "0":
    os.kill(int(sys.argv[2]), signal.SIGTERM)
time.sleep(600)
"""
    before = signal.getsignal(signal.SIGTERM)
    assert launch(_python(code, str(tmp_path), str(os.getpid())), TWO) == 128 + signal.SIGTERM
    assert {p.name for p in tmp_path.glob("ended*")} == {"ended0", "ended1"}
    assert signal.getsignal(signal.SIGTERM) == before


def test_nothing_starts_after_a_signal(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1] + '/started', 'w')"
    with Caught() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert launch(_python(code, str(tmp_path)), TWO, caught=caught) == 130
    assert not list(tmp_path.iterdir())


def test_what_words_mean() -> None:
    assert command_line(["-m", "x", "y"]) == [sys.executable, "-m", "x", "y"]
    assert command_line(["a/b.py", "-c"]) == [sys.executable, "a/b.py", "-c"]
    assert command_line(["program", "-m"]) == ["program", "-m"]
