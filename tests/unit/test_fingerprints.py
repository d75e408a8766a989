"""Fingerprints see code and nothing else, and look names up in every branch."""

from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from megatron_taco.patching.fingerprints import Known, SourceFile, known
from megatron_taco.patching.inspection import megatron_root, megatron_version
from megatron_taco.patching.targets import TARGETS

BASE = '''
def work(x: int, *rest, flag=True):
    """What it does."""
    if x > 1:  # a comment
        return x + 1

    return None
'''


def digest(source: str, name: str = "work") -> str:
    found = SourceFile(source).fingerprint(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""What it does."""', '"""Something else."""'),
        ('    """What it does."""\n', ""),
        ("# a comment", "# another"),
        ("\n\n    return None", "\n    return None"),
        ("x + 1", "(x\n            + 1)"),
        ("def work(", "other = 3\n\ndef work("),
    ],
)
def test_layout_comments_and_docstrings_do_not_count(old: str, new: str) -> None:
    assert old in BASE
    assert digest(BASE) == digest(BASE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("x + 1", "x + 1.0"),
        ("x + 1", "x - 1"),
        ("flag=True", "flag=False"),
        ("flag=True", "flag=None"),
        ("*rest, ", "*, "),
        ("return None", "return"),
        ("return None", "pass"),
        ("def work", "@staticmethod\ndef work"),
        ("def work", "async def work"),
    ],
)
def test_code_counts(old: str, new: str) -> None:
    assert old in BASE
    assert digest(BASE) != digest(BASE.replace(old, new))


def test_a_string_that_is_no_docstring_counts() -> None:
    assert digest("def work():\n    x = 'a'") != digest("def work():\n    x = 'b'")


def test_a_method_belongs_to_its_class() -> None:
    source = "class A:\n    def run(self): return 1\nclass B:\n    def run(self): return 2\n"
    assert digest(source, "A.run") != digest(source, "B.run")
    assert SourceFile(source).fingerprint("A.stop") is None
    assert SourceFile(source).fingerprint("run") is None


BRANCHES = """
try:
    if NEW:
        gather = torch.distributed.all_gather_into_tensor
    else:
        gather = torch.distributed._all_gather_base
except AttributeError:
    gather = None
import torch.nn as nn, os.path
from a import b as c
first, (second, third) = 1, (2, 3)
typed: int = 4
"""


def test_every_branch_that_binds_a_name_is_found_and_counts() -> None:
    assert len(SourceFile(BRANCHES).find("gather")) == 3
    changed = BRANCHES.replace("gather = None", "gather = False")
    assert digest(BRANCHES, "gather") != digest(changed, "gather")


@pytest.mark.parametrize("name", ["nn", "os", "c", "first", "second", "third", "typed"])
def test_all_kinds_of_binding_are_found(name: str) -> None:
    assert len(SourceFile(BRANCHES).find(name)) == 1


def test_json_round_trip() -> None:
    data = Known(("1", "2"), {"m:f": {"aa": ("1",), "bb": ("2",)}})
    assert Known.from_json(data.to_json()) == data
    assert data.seen_in("m", "f", "bb") == ("2",)
    assert data.seen_in("m", "f", "cc") == data.seen_in("m", "g", "aa") == ()


def test_stored_data_cover_every_target_in_every_version() -> None:
    stored = known()
    assert {"0.18.0", "0.18.2", "0.19.0", "0.19.1", "0.19.2"} <= set(stored.versions)
    wanted = {f"{t.module}:{name}" for t in TARGETS for name in t.fingerprinted}
    assert set(stored.objects) == wanted
    for name, digests in stored.objects.items():
        seen = sorted(version for versions in digests.values() for version in versions)
        assert seen == sorted(stored.versions), name


@pytest.fixture
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "update_fingerprints.py"
    spec = util.spec_from_file_location("update_fingerprints", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_update_script_finds_what_is_stored(script: ModuleType, tmp_path: Path) -> None:
    root, output = megatron_root(), tmp_path / "out.json"
    assert root is not None
    version = megatron_version(root)
    assert script.main(["--wheel", str(root), "--output", str(output)]) == 0
    made = Known.from_json(output.read_text())
    assert made.versions == (version,)
    for name, digests in made.objects.items():
        (digest,) = digests
        module, dotted = name.split(":")
        assert version in known().seen_in(module, dotted, digest)


def test_the_update_script_keeps_other_versions(script: ModuleType, tmp_path: Path) -> None:
    output, root = tmp_path / "out.json", megatron_root()
    output.write_text(known().to_json())
    assert script.main(["--wheel", str(root), "--output", str(output)]) == 0
    assert output.read_text() == known().to_json()


def test_the_update_script_refuses_a_folder_without_megatron(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    assert script.main(["--wheel", str(tmp_path), "--output", str(output)]) == 2
    assert "package_info.py" in capsys.readouterr().err
    assert not output.exists()
