"""Settings for a user's own script: two sections, from a file, a mapping or flags alone."""

from pathlib import Path
from typing import Any

import pytest

from megatron_taco.config import ConfigError, load_settings


def test_file_mapping_and_flags_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "taco.yaml"
    path.write_text("compression: {tensor_parallel: {mode: on, block: 128, min_bytes: 64KiB}}\n")
    tree = {"compression": {"tensor_parallel": {"mode": "on", "block": 128, "min_bytes": "64KiB"}}}
    flags = [
        f"compression.tensor_parallel.{x}" for x in ("mode=on", "block=128", "min_bytes=64KiB")
    ]
    from_file = load_settings(path)
    assert from_file == load_settings(tree) == load_settings(None, flags)
    assert from_file.canonical() == load_settings(None, flags).canonical()
    assert load_settings(tree, ["compression.tensor_parallel.block=64"]) != from_file
    assert tree["compression"]["tensor_parallel"]["block"] == 128
    assert from_file.where("compression.tensor_parallel.block") == f"{path}:1"
    assert from_file.compression.tensor_parallel.min_bytes == 64 * 1024


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    settings = load_settings(None, ["compression.tensor_parallel.format=int6"])
    path = tmp_path / "config.yaml"
    path.write_text(settings.to_yaml())
    assert load_settings(path) == settings


NOTHING = {"forward": False, "backward": False}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"compressoin": {}}, "compressoin: unknown key; allowed: compression, telemetry"),
        ({"megatron": {"lr": 1}}, "megatron: a section of the trainer"),
        ({"compression": 3}, "compression: 3 is not a section"),
        ({"telemetry": {"tensorboard": True}}, "use Megatron's own --tensorboard-dir"),
        ({"telemetry": {"wandb": {"project": "x"}}}, "use Megatron's own --wandb-project"),
        (
            {
                "compression": {
                    "tensor_parallel": {"mode": "on", "forward": False, "backward": False}
                }
            },
            "compresses nothing",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(tree)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "taco.yaml"
    path.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="the file is empty; allowed: a mapping of the sections"):
        load_settings(path)
    with pytest.raises(ConfigError, match=r"no such file \(nearest: taco.yaml\)"):
        load_settings(tmp_path / "taca.yaml")
