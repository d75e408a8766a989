"""The patches for a Megatron-LM tree: applied to a copy of the installed wheel, which trains."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.drop_in.argument import install_from_argument
from megatron_taco.patching.inspection import megatron_root, megatron_version
from tests.distributed.test_launch import FLAGS, ROOT, SCRIPT, TP2
from tests.distributed.training import metrics
from tests.ranks import RankRunner

PATCHER = Path(ROOT) / "scripts" / "patch_megatron.py"


@pytest.fixture(scope="module")
def patcher() -> Any:
    spec = importlib.util.spec_from_file_location("patch_megatron", PATCHER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the installed wheel's ``megatron.training``; its core is the wheel's own."""
    root = megatron_root()
    assert root is not None
    folder = tmp_path / "tree" / "megatron"
    folder.mkdir(parents=True)
    shutil.copytree(
        root / "megatron" / "training", folder / "training",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    (folder / "core").symlink_to(root / "megatron" / "core")
    return tmp_path / "tree"


def contents(tree: Path) -> dict[str, bytes]:
    files = (tree / "megatron" / "training").rglob("*")
    return {str(file): file.read_bytes() for file in files if file.suffix == ".py"}


def test_apply_check_and_revert_restore_every_byte(
    patcher: Any, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tree)
    version = megatron_version(tree)
    said = []
    for action in ("check", "apply", "apply", "check"):
        assert patcher.main([action, str(tree)]) == 0
        said.append(capsys.readouterr().out)
    assert [re.sub(r".*\(Megatron (.*)\) (.*) /.*\n", r"\1 \2", line) for line in said] == [
        f"{version} can be applied to", f"{version} applied to",
        f"{version} is applied already to", f"{version} is applied to",
    ]  # fmt: skip
    changed = {name for name, text in contents(tree).items() if text != before[name]}
    assert [Path(name).name for name in changed] == ["arguments.py"]
    assert patcher.main(["revert", str(tree)]) == 0
    assert contents(tree) == before
    assert patcher.main(["revert", str(tree)]) == 0
    assert "is not applied" in capsys.readouterr().out


def test_git_apply_takes_the_patch_too(tree: Path, patcher: Any) -> None:
    _, patch = patcher.find_patch(tree)
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    for arguments in (["--check"], [], ["--check", "--reverse"]):
        subprocess.run(["git", "apply", *arguments, patch], cwd=tree, env=environ, check=True)
    assert patcher.run("revert", tree).startswith(patch.name)


def test_a_tree_that_is_not_known_is_refused_by_name(
    patcher: Any, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert patcher.main(["apply", str(tmp_path)]) == 2
    assert "holds no megatron/core/package_info.py" in capsys.readouterr().err
    (tree / "megatron" / "core").unlink()
    (tree / "megatron" / "core").mkdir()
    info = tree / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = ''\n")
    before = contents(tree)
    assert patcher.main(["apply", str(tree)]) == 2
    assert "Megatron 0.17.1 is not known; there are patches for" in capsys.readouterr().err
    info.write_text(info.read_text().replace("17", "19"))
    arguments = tree / "megatron" / "training" / "arguments.py"
    arguments.write_text(arguments.read_text().replace("set_global_variables(args)", "pass"))
    before[str(arguments)] = arguments.read_bytes()
    assert patcher.main(["check", str(tree)]) == 1
    assert patcher.main(["apply", str(tree)]) == 1
    assert "nothing was changed" in capsys.readouterr().err
    assert contents(tree) == before


def train_patched(rank: int, world_size: int, flags: list[str]) -> str:
    """Run a user's script as Python would; returns which Megatron it imported."""
    from megatron_taco.drop_in.script import run_script
    from megatron_taco.patching.cpu import CpuShim

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    CpuShim().install().install_megatron()
    sys.path.insert(0, ROOT)
    run_script(SCRIPT, flags)
    import megatron.training

    return str(Path(megatron.training.__file__).parent)


def test_a_patched_megatron_trains_compressed(
    run_ranks: RankRunner, patcher: Any, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher.run("apply", tree)
    monkeypatch.syspath_prepend(str(tree))
    config = tmp_path / "taco.yaml"
    config.write_text("compression: {tensor_parallel: {mode: on, min_bytes: 1KiB}}\n")
    flags = [*FLAGS, *TP2, "--train-iters", "2", "--compression-config", str(config)]
    used = run_ranks(
        train_patched, 2, flags, init=False, timeout=200, env={"TORCHDYNAMO_DISABLE": "1"},
        cwd=tmp_path, preload="torch",
    )  # fmt: skip
    assert used == [str(tree / "megatron" / "training")] * 2
    records = metrics(tmp_path / "megatron_taco_runs", "users_script")
    assert [record["event"] for record in records] == ["step", "step", "end"]
    flow = records[-1]["flows"]["tp.forward all_reduce"]
    assert flow["compressed"] == flow["calls"] > 0


def test_a_mistake_in_the_arguments_file_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "taco.yaml"
    config.write_text("compression: {tensor_parallel: {mode: sideways}}\n")
    with pytest.raises(SystemExit) as stop:
        install_from_argument(str(config))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {config}:1: compression.tensor_parallel.mode: 'sideways' is")
    assert error.count("\n") == 1
