"""`megatron-taco` and its `doctor`: what is printed, exit codes, and what is not imported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from megatron_taco.cli import COMMANDS, doctor, machine, main
from megatron_taco.patching import inspection
from megatron_taco.patching.targets import TARGETS

CONFIG = """\
data: {source: mock, tokenizer: bytes}
model: {preset: gpt-tiny}
megatron:
  tensor_model_parallel_size: 2
  tp_comm_overlap: false
  micro_batch_size: 2
  global_batch_size: 4
  train_iters: 2
  lr: 1e-3
compression: {tensor_parallel: {mode: on}}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def fake_megatron(root: Path, version: tuple[int, int, int]) -> Path:
    core = root / "megatron" / "core"
    (core / "datasets").mkdir(parents=True)
    major, minor, patch = version
    (core / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    )
    return core


@pytest.fixture
def use_root(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | None], None]:
    def use(root: Path | None) -> None:
        monkeypatch.setattr(inspection, "megatron_root", lambda: root)
        monkeypatch.setattr(doctor, "megatron_root", lambda: root)

    return use


def test_installed_megatron_fits_and_json_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [target["name"] for target in report["targets"]] == [t.name for t in TARGETS]
    assert {target["status"] for target in report["targets"]} == {"ok"}
    assert all(not Path(target["file"]).is_absolute() for target in report["targets"])
    facts = {fact["name"]: fact for fact in report["machine"]}
    assert {"python", "torch", "NCCL", "gloo", "triton", "psutil"} <= facts.keys()
    assert code == (0 if report["ok"] else 1)
    assert report["ok"] == (report["problems"] == [])


def test_table_names_every_target_and_file(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out.replace("\n", "")
    for target in TARGETS:
        assert target.name in text
    assert "gloo" in text


def test_config_that_fits(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    main(["doctor", "--json", "--config", str(config_file)])
    report = json.loads(capsys.readouterr().out)
    assert report["config"] == str(config_file)
    assert report["conflicts"] == []


def test_conflict_gives_exit_code_1_and_names_the_line(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    config_file.write_text(CONFIG.replace("overlap: false", "overlap: true"))
    assert main(["doctor", "--config", str(config_file)]) == 1
    text = capsys.readouterr().out
    assert f"{config_file}:5: megatron.tp_comm_overlap: true" in text
    assert "set megatron.tp_comm_overlap: false" in text


def test_overrides_are_the_trainers(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    arguments = ["doctor", "--json", "--quick", "--config", str(config_file)]
    assert main([*arguments, "megatron.tp_comm_overlap=true"]) == 1
    (message,) = json.loads(capsys.readouterr().out)["conflicts"]
    assert message.startswith("command line")


def test_asking_for_a_gpu_that_is_not_there(
    capsys: pytest.CaptureFixture[str], config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_cuda", lambda: False)
    arguments = ["doctor", "--json", "--config", str(config_file), "run.device=cuda"]
    assert main(arguments) == 1
    (message,) = json.loads(capsys.readouterr().out)["conflicts"]
    assert "torch sees no GPU" in message


def test_megatrons_parser_has_its_say_but_not_when_quick(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    environment, arguments = dict(os.environ), list(sys.argv)
    doctor_this = ["doctor", "--json", "--config", str(config_file)]
    wrong = ["megatron.seq_length=4096", "run.device=cpu"]
    assert main([*doctor_this, *wrong]) == 1
    captured = capsys.readouterr()
    (message,) = json.loads(captured.out)["conflicts"]
    assert "Megatron refuses it: max_position_embeddings (128)" in message
    assert captured.err == ""
    assert (dict(os.environ), sys.argv) == (environment, arguments)
    main([*doctor_this, "--quick", *wrong])
    assert json.loads(capsys.readouterr().out)["conflicts"] == []


def test_the_fewest_processes_are_enough_for_the_parser(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    doctor_this = ["doctor", "--json", "--config", str(config_file), "run.device=cpu"]
    main([*doctor_this, "megatron.pipeline_model_parallel_size=2"])
    assert json.loads(capsys.readouterr().out)["conflicts"] == []
    assert main([*doctor_this, "megatron.pipeline_model_parallel_size=3"]) == 1
    (message,) = json.loads(capsys.readouterr().out)["conflicts"]
    assert "Number of layers should be divisible" in message


@pytest.mark.parametrize("quick", [True, False])
def test_files_that_are_not_there_are_problems(
    capsys: pytest.CaptureFixture[str], config_file: Path, quick: bool
) -> None:
    arguments = ["doctor", "--json", "--config", str(config_file), *["--quick"] * quick]
    assert main([*arguments, "data={path: no/such, tokenizer: bytes}"]) == 1
    (message,) = json.loads(capsys.readouterr().out)["conflicts"]
    assert "there is no no/such.bin" in message


def test_the_data_are_looked_into(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    from megatron_taco.data.writer import DocumentWriter

    prefix = config_file.with_name("one")
    with DocumentWriter(prefix, vocab_size=257) as writer:
        writer.add(np.zeros(1000, dtype=np.uint16), "zeros")
    arguments = ["doctor", "--json", "--config", str(config_file)]
    assert main([*arguments, f"data={{path: {prefix}, split: '9,1', tokenizer: bytes}}"]) == 1
    (message,) = json.loads(capsys.readouterr().out)["conflicts"]
    assert "has 1 document (1000 tokens)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--config", "no-such-file.yaml"], "no-such-file.yaml"),
        (["doctor", "a.b=c"], "overrides need --config"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["docter"])
    assert caught.value.code == 2
    assert "nearest: doctor" in capsys.readouterr().err


def test_no_megatron(
    capsys: pytest.CaptureFixture[str], use_root: Callable[[Path | None], None]
) -> None:
    use_root(None)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["megatron_core"] is None
    assert {target["status"] for target in report["targets"]} == {"missing"}
    assert "pip install 'megatron-core>=0.18,<0.20'" in report["problems"][0]


def test_unsupported_version(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, use_root: Callable[[Path | None], None]
) -> None:
    fake_megatron(tmp_path, (0, 16, 1))
    use_root(tmp_path)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["megatron_core"] == "0.16.1"
    assert {target["status"] for target in report["targets"]} == {"unsupported"}


def test_changed_and_missing_sources_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, use_root: Callable[[Path | None], None]
) -> None:
    core = fake_megatron(tmp_path, (0, 19, 5))
    (core / "datasets" / "utils.py").write_text("def compile_helpers():\n    return 1\n")
    use_root(tmp_path)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    status = {target["name"]: target for target in report["targets"]}
    assert status["startup.compile_helpers"]["status"] == "changed"
    assert "compile_helpers (" in status["startup.compile_helpers"]["detail"]
    assert status["tensor.row_forward"]["status"] == "missing"
    (helpers,) = [fact for fact in report["machine"] if fact["name"] == "dataset helpers"]
    assert helpers["level"] == "problem"
    assert all("compile_helpers" not in repair for repair in report["repairs"])


@pytest.mark.parametrize("wheel", [True, False])
def test_start_up_repair_is_planned_for_a_wheel_alone(tmp_path: Path, wheel: bool) -> None:
    core = fake_megatron(tmp_path, (0, 19, 2))
    (core / "datasets" / "helpers_cpp.cpython-312-x86_64-linux-gnu.so").touch()
    if not wheel:
        (core / "datasets" / "Makefile").touch()
    repairs = machine.planned_repairs(tmp_path, cuda=True)
    assert len(repairs) == (1 if wheel else 0)
    with_shim = machine.planned_repairs(tmp_path, cuda=False)
    assert len(with_shim) == len(repairs) + 1


@pytest.mark.parametrize(
    ("content", "level", "text"),
    [(None, "note", "not installed"), ("lib", "note", "another project"), ("amp", "ok", "inst")],
)
def test_apex_of_pypi_is_told_from_nvidias(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    level: str,
    text: str,
) -> None:
    assert util.find_spec("apex") is None, "this test makes an apex of its own"
    if content:
        (tmp_path / "apex" / content).mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    (apex,) = [fact for fact in machine.describe_machine(None) if fact.name == "apex"]
    assert apex.level == level
    assert text in apex.value


def test_a_transformer_engine_that_is_not_known_is_a_note_until_a_configuration_wants_it(
    capsys: pytest.CaptureFixture[str],
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "distributed.py").write_text("def allreduce(inp): return inp\n")
    notes = tmp_path / "transformer_engine-2.20.2.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Name: transformer-engine\nVersion: 2.20.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    doctor_this = ["doctor", "--json", "--quick", "--config", str(config_file)]
    main(doctor_this)
    report = json.loads(capsys.readouterr().out)
    status = {target["name"]: target["status"] for target in report["targets"]}
    assert status["tensor.te.all_reduce"] == "changed"
    assert status["tensor.te.linear_function"] == "missing"
    assert report["conflicts"] == []
    (fact,) = [fact for fact in report["machine"] if fact["name"] == "transformer-engine"]
    assert fact["level"] == "note"
    assert fact["value"].startswith("2.20.2: tensor.te.all_reduce: source not known from 2.10.0")
    assert main([*doctor_this, "megatron.transformer_impl=transformer_engine"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert any("tensor.te.all_reduce: source not known" in line for line in report["conflicts"])


def test_help_lists_commands_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom megatron_taco.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as error: assert error.code == 0\n"
        "heavy = {'torch', 'megatron', 'megatron_taco.cli.doctor', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_looking_at_targets_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\n"
        "from megatron_taco.patching.fingerprints import known\n"
        "from megatron_taco.patching.inspection import inspect_all\n"
        "from megatron_taco.patching.registry import registry\n"
        "from megatron_taco.patching.targets import TARGETS\n"
        "assert {f.status for f in inspect_all(TARGETS, known())} == {'ok'}\n"
        "assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
