"""Loading: resolution, origins, canonical form, round trip."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.config import Config, ConfigError, Tokenizer, diff, load
from megatron_taco.config.canonical import HOST_ONLY, to_yaml
from megatron_taco.config.files import missing_files
from megatron_taco.config.sizes import UNITS, parse_size
from megatron_taco.config.yaml_source import plain_scalar, read_yaml

EXAMPLE = """\
run: {name: demo}
data:
  source: python-stdlib
model:
  preset: gpt-tiny
  num_layers: 6
megatron:
  tensor_model_parallel_size: 2
  lr: 1e-3
  save: off
compression:
  tensor_parallel:
    mode: on
    min_bytes: 16KiB
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.yaml"
    file.write_text(EXAMPLE)
    return file


def test_values_defaults_and_the_preset(path: Path) -> None:
    config = load(path)
    assert config.run.name == "demo"
    assert config.run.device == "auto"
    assert config.run.folder == Path("runs/demo")
    assert config.data.tokenizer == Tokenizer(kind="bytes", vocab_size=257)
    assert str(config.data.tokenizer) == "bytes"
    assert config.megatron == {"tensor_model_parallel_size": 2, "lr": 0.001, "save": "off"}
    taco = config.compression.tensor_parallel
    assert (taco.mode, taco.enabled, taco.min_bytes, taco.block) == ("on", True, 16384, 256)
    arguments = config.model.arguments()
    assert arguments["num_layers"] == 6
    assert arguments["hidden_size"] == 128
    assert "preset" not in arguments
    assert "attention" not in arguments


def test_where_every_value_came_from(path: Path) -> None:
    config = load(path, ["megatron.lr=2e-3", "telemetry={error_every: 5}"])
    assert config.where("compression.tensor_parallel.mode") == f"{path}:13"
    assert config.where("model.num_layers") == f"{path}:6"
    assert config.where("model.hidden_size") == "preset gpt-tiny"
    assert config.where("megatron.lr") == "command line"
    assert config.where("telemetry.error_every") == "command line"
    assert config.where("run.device") == "default"
    assert config.where("compression.tensor_parallel.block") == "default"


def test_overrides_are_read_like_yaml_and_the_last_one_counts(path: Path) -> None:
    config = load(
        path,
        [
            "megatron.lr=1",
            "megatron.lr=5e-4",
            "megatron.iterations_to_skip=[1, 2]",
            "run.quiet=false",
            "data.source=null",
            "data.path=[0.5, a, 0.5, b]",
            "data.tokenizer={hf: tokenizers/x}",
            "compression.tensor_parallel.mode=off",
        ],
    )
    assert config.megatron["lr"] == 5e-4
    assert config.megatron["iterations_to_skip"] == [1, 2]
    assert config.run.quiet is False
    assert config.data.source is None
    assert config.data.path == (0.5, "a", 0.5, "b")
    assert str(config.data.tokenizer) == "hf:tokenizers/x"
    assert config.where("data.path.2") == "command line"
    assert not config.compression.tensor_parallel.enabled


def test_null_takes_a_preset_value_away(path: Path, tmp_path: Path) -> None:
    config = load(path, ["model.preset=qwen3-8b", "model.num_query_groups=null"])
    assert "num_query_groups" not in config.model.arguments()
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load(again) == config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.source=mock", "data.tokenizer={null: 1000}"],
        ["data={train_path: t, valid_path: [v, w], tokenizer: {hf: some/folder}}"],
        ["data={path: [1, a, 2.5, b], split: '90,5,5', tokenizer: bytes}"],
        ["model.preset=qwen2.5-7b", "telemetry.wandb={project: p, mode: offline}"],
        ["megatron.save='1e-3'", "megatron.load='true'", "megatron.tag=0x10", "run.name='007'"],
    ],
)
def test_the_resolved_yaml_loads_back_to_an_equal_config(
    path: Path, tmp_path: Path, overrides: list[str]
) -> None:
    config = load(path, overrides)
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    loaded = load(again)
    assert loaded == config
    assert loaded.canonical() == config.canonical()


def test_the_canonical_form_is_flat_sorted_and_without_the_host(path: Path) -> None:
    config = load(path)
    canonical = config.canonical()
    assert list(canonical) == sorted(canonical)
    assert all(isinstance(v, str | int | float | bool) for v in canonical.values())
    assert canonical["model.hidden_size"] == 128
    assert not any(key.startswith(host) for key in canonical for host in HOST_ONLY)
    elsewhere = load(path, ["run.name=other", "run.dir=/x", "run.quiet=false", "data.cache=/y"])
    assert elsewhere.canonical() == canonical
    assert elsewhere != config


def test_a_preset_and_the_same_keys_written_out_are_the_same_run(
    path: Path, tmp_path: Path
) -> None:
    config = load(path)
    written = tmp_path / "written.yaml"
    written.write_text(config.to_yaml().replace("  preset: gpt-tiny\n", ""))
    assert load(written).canonical() == config.canonical()


def test_diff_names_keys_and_both_values(path: Path) -> None:
    a = load(path).canonical()
    b = load(path, ["megatron.lr=1.0", "megatron.seed=1"]).canonical()
    assert diff(a, b) == ["megatron.lr: 0.001 != 1.0", "megatron.seed: (not set) != 1"]
    assert diff(a, a) == []
    assert diff({"k": 1}, {"k": True}) == ["k: 1 != true"]


def test_a_config_is_frozen_and_travels_between_processes(path: Path) -> None:
    config = load(path)
    with pytest.raises(AttributeError):
        config.run = config.run  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.run.name = "x"  # type: ignore[misc]
    copied: Config = pickle.loads(pickle.dumps(config))
    assert copied == config
    assert copied.where("model.num_layers") == config.where("model.num_layers")
    assert copy.deepcopy(config) == config


def test_an_error_travels_between_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.yaml")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_missing_files_are_named_with_their_place(path: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "there"
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).write_bytes(b"")
    config = load(path, ["data.source=null", f"data.path=[{prefix}, nowhere]", *HF])
    texts = [str(problem) for problem in missing_files(config)]
    assert len(texts) == 2
    assert texts[0].startswith("command line: data.path=[")
    assert "there is no nowhere.bin" in texts[0]
    assert "there is no folder no/tokenizer" in texts[1]
    assert missing_files(load(path)) == []


HF = ["data.tokenizer={hf: no/tokenizer}"]


def test_importing_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_taco, megatron_taco.config, megatron_taco.training.megatron_args\n"
        "print(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", "1_000"),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("-", "-"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = plain_scalar(text)
    assert found == value
    assert type(found) is type(value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["C"]))
    | st.sampled_from(["on", "1e-3", "0x1", "null", "~", "", "'", "a: b", "# c", "- d", "1.0"])
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1).filter(
    lambda name: name != "<<" and name.isprintable()
)


@given(st.dictionaries(NAMES, st.lists(SCALARS) | SCALARS | st.dictionaries(NAMES, SCALARS)))
def test_what_is_written_is_read_back(tree: dict[str, object]) -> None:
    parsed = read_yaml(to_yaml(tree), "x")
    assert parsed.problems == []
    assert (parsed.value or {}) == tree


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_sizes(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == parse_size(f"{count} {unit}") == count * UNITS[unit]
    assert parse_size(count) == count
