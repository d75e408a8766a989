"""Settings of pipeline boundaries that cannot work are refused with line and change."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_taco.config import Config, ConfigError, load
from megatron_taco.patching import conflicts


def config(tmp_path: Path, section: dict[str, Any], **megatron: Any) -> Config:
    document = {
        "data": {"source": "mock", "tokenizer": "bytes"},
        "model": {"preset": "gpt-tiny"},
        "megatron": {"pipeline_model_parallel_size": 2, **megatron},
        "compression": {"pipeline_parallel": {"mode": "on", "rank": 16, **section}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return load(path)


@pytest.mark.parametrize(
    ("section", "megatron", "message"),
    [
        ({}, {"cuda_graph_impl": "local"}, "set megatron.cuda_graph_impl: none"),
        ({}, {"use_torch_fsdp2": True}, "set megatron.use_torch_fsdp2: false"),
        ({}, {"pipeline_model_parallel_size": 1}, "no stage cut to put a boundary at"),
        ({"after_layers": [2, 400]}, {}, "[400] with"),
        ({"rank": 100000}, {}, "rank: 100000 with a hidden size of"),
    ],
)
def test_refused(
    tmp_path: Path, section: dict[str, Any], megatron: dict[str, Any], message: str
) -> None:
    (found,) = conflicts.check(config(tmp_path, section, **megatron))
    assert message in found
    assert conflicts.check(config(tmp_path, {**section, "mode": "off"}, **megatron)) == []


def test_in_place_needs_depths_alone(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"after_layers": [1]}, pipeline_model_parallel_size=1)
    assert conflicts.check(loaded) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"after_layers": [3, 2]}, "numbers of layers from 1, ascending"),
        ({"after_layers": []}, "numbers of layers from 1, ascending"),
        ({"boundary": "taco"}, "rank: boundary: taco has no rank; remove the key"),
        ({"boundary": "residual_bottleneck", "anchors": "full"}, "has no anchors; allowed: none"),
        ({"boundary": "maple"}, "nearest: mapl"),
        ({"lr": 0.3}, "lr: 0.3 is out of range; allowed: at most 0.25"),
        (
            {"quantizer": {"backward": {"kind": "rvq"}}},
            "quantizer.backward.kind: rvq is for activations alone",
        ),
        (
            {"quantizer": {"forward": {"kind": "int8", "codes": 16}}},
            "quantizer.forward.codes: not an option of kind: int8; allowed: block, rotation",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, section)
    assert message in str(error.value)


def test_the_resolved_configuration_loads_again(tmp_path: Path) -> None:
    section = {
        "after_layers": [1],
        "quantizer": {"forward": {"kind": "rvq", "codes": 16}, "backward": {"kind": "int8"}},
    }
    loaded = config(tmp_path, section)
    path = tmp_path / "again.yaml"
    path.write_text(loaded.to_yaml())
    assert load(path) == loaded
