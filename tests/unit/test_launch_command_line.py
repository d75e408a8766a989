"""What `megatron_taco.launch` takes for itself and what it leaves to the script."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_taco.config import ConfigError
from megatron_taco.drop_in.command_line import parse, take_dotted
from megatron_taco.launch import main


def test_our_flags_stand_before_the_script_and_dotted_ones_anywhere() -> None:
    launch = parse(
        ["--compression", "taco.yaml", "--compression.tensor_parallel.format=int8", "train.py",
         "--lr", "1e-3", "--compression.tensor_parallel.mode", "on", "--device", "theirs",
         "--telemetry.error_every", "5", "--compression", "theirs.yaml"]
    )  # fmt: skip
    assert launch.script == "train.py"
    assert launch.compression == "taco.yaml"
    assert launch.device is None
    assert launch.overrides == (
        "compression.tensor_parallel.format=int8",
        "compression.tensor_parallel.mode=on",
        "telemetry.error_every=5",
    )
    assert launch.arguments == (
        "--lr", "1e-3", "--device", "theirs", "--compression", "theirs.yaml",
    )  # fmt: skip


def test_negative_and_empty_looking_values_stay_with_the_script() -> None:
    assert take_dotted(["a.py", "--x", "-1", "--", "--compression"]) == (
        [],
        ["a.py", "--x", "-1", "--", "--compression"],
    )


@pytest.mark.parametrize(
    "argv",
    [["--compression.tensor_parallel.mode"], ["--compression.tensor_parallel.mode", "--lr", "1"]],
)
def test_a_dotted_flag_needs_a_value(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--compression\.tensor_parallel\.mode: no value"):
        take_dotted(argv)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_mistakes_are_one_line_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the script ran')\n")
    config = tmp_path / "taco.yaml"
    config.write_text("compression: {tensor_parallel: {mode: on}}\nmodel: {preset: gpt-tiny}\n")
    on = "--compression.tensor_parallel.mode=on"
    assert "nothing says what to compress" in refused([str(script)], capsys)
    assert "missing.py: does not exist" in refused([on, "missing.py"], capsys)
    assert "is a folder" in refused([on, str(tmp_path)], capsys)
    misspelt = "--compression.tensor_paralel.mode=on"
    assert "nearest: tensor_parallel" in refused([misspelt, str(script)], capsys)
    assert "allowed: off, on" in refused([on[:-2] + "sideways", str(script)], capsys)
    text = refused(["--compression", str(config), str(script)], capsys)
    assert f"{config}:2: model: a section of the trainer" in text
    assert "no such file" in refused(["--compression", "none.yaml", str(script)], capsys)


def test_a_script_that_never_trains_with_megatron_is_an_error_unless_off(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('my own loop')\n")
    for mode, code in (("on", 2), ("off", 0)):
        done = subprocess.run(
            [sys.executable, "-m", "megatron_taco.launch",
             "--compression.tensor_parallel.mode", mode, str(script)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert done.stdout == "my own loop\n"
        assert ("has ended and nothing was compressed" in done.stderr) == (code == 2)


def test_the_scripts_own_failure_and_exit_code_are_its_own(tmp_path: Path) -> None:
    """Its traceback shows its frames, as if Python had run it; its exit code is passed on."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nif len(sys.argv) > 1:\n    sys.exit(7)\n1 / 0\n")
    command = [
        sys.executable, "-m", "megatron_taco.launch",
        "--compression.tensor_parallel.mode", "on", str(script),
    ]  # fmt: skip
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert str(script) in lines[1]
    assert "ZeroDivisionError" in lines[-1]
    assert "launch.py" not in failed.stderr
    assert subprocess.run([*command, "x"], timeout=60).returncode == 7


def test_a_megatron_that_is_not_known_is_refused_when_it_is_imported(tmp_path: Path) -> None:
    """What to do stands in the message; nothing of it is replaced."""
    core, training = tmp_path / "megatron" / "core", tmp_path / "megatron" / "training"
    for folder in (core, training):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = ''\n")
    (training / "training.py").write_text("def pretrain(): print('uncompressed')\n")
    script = tmp_path / "train.py"
    script.write_text("from megatron.training.training import pretrain\npretrain()\n")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_taco.launch",
         "--compression.tensor_parallel.mode", "on", str(script)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "megatron-core 0.17.1 is not in >=0.18,<0.20" in done.stderr
    assert "pip install 'megatron-core>=0.18,<0.20'" in done.stderr
    assert done.stderr.count("\n") == 1
