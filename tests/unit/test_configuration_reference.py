"""docs/configuration.md is what the schema says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = ROOT / "scripts" / "configuration_reference.py"
    spec = importlib.util.spec_from_file_location("configuration_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(reference: ModuleType) -> None:
    assert reference.main(["--check"]) == 0, "run scripts/configuration_reference.py"


def test_a_stale_or_missing_one_is_noticed(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TARGET", tmp_path / "configuration.md")
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    with reference.TARGET.open("a") as file:
        file.write("edited")
    assert reference.main(["--check"]) == 1


def test_every_key_has_a_row_with_values_default_and_words(reference: ModuleType) -> None:
    rows = [line for line in reference.document().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for row in rows:
        cells = [cell.strip() for cell in row.replace("\\|", "").strip("|").split("|")]
        assert len(cells) == 4
        assert cells[1]
        assert cells[3]
