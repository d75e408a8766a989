"""The run folder loses nothing and is held by one run at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_taco.data import DataError
from megatron_taco.telemetry.reporter import _finite
from megatron_taco.training.run_folder import RunFolder


def test_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for number in range(3):
        with folder.claimed(f"n: {number}\n", resume=False):
            folder.metrics.write_text(f'{{"run": {number}}}\n')
            folder.log_path(0).write_text(f"log {number}")
    assert (folder.path / "config.yaml").read_text() == "n: 2\n"
    for number in range(2):
        before = folder.path / f"previous-{number + 1}"
        assert (before / "config.yaml").read_text() == f"n: {number}\n"
        assert json.loads((before / "metrics.jsonl").read_text()) == {"run": number}
        assert (before / "logs" / "rank0.log").read_text() == f"log {number}"


def test_a_resumed_run_goes_on_with_metrics_and_keeps_the_old_description(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.claimed("n: 1\n", resume=False):
        folder.metrics.write_text("first\n")
    with folder.claimed("n: 2\n", resume=True):
        assert folder.metrics.read_text() == "first\n"
    assert (tmp_path / "previous-1" / "config.yaml").read_text() == "n: 1\n"
    assert not (tmp_path / "previous-1" / "metrics.jsonl").exists()


def test_a_folder_in_use_is_refused_and_untouched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from megatron_taco.training.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).claimed('n: 1', resume=False):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(DataError, match=rf"run folder .* process {other.pid}"),
            folder.claimed("n: 2", resume=False),
        ):
            pass
        assert (tmp_path / "config.yaml").read_text() == "n: 1"
        other.communicate("")
    with folder.claimed("n: 2", resume=False):
        pass


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OSError, match="file"),
        RunFolder(tmp_path / "file" / "run").claimed("", resume=False),
    ):
        pass


def test_records_are_json_whatever_the_loss_is() -> None:
    record = {"loss": float("nan"), "flows": {"a": {"error": float("inf"), "calls": 2}}, "n": 1.5}
    text = json.dumps(_finite(record), allow_nan=False)
    assert json.loads(text) == {
        "loss": None,
        "flows": {"a": {"error": None, "calls": 2}},
        "n": 1.5,
    }
