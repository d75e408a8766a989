"""Settings of pipeline boundaries that cannot work are refused with line and change."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_taco.config import Config, ConfigError, load
from megatron_taco.patching import conflicts, pipeline_conflicts
from megatron_taco.patching.cpu import CpuShim
from megatron_taco.training.megatron_args import parse

ROPE = {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}


def config(
    tmp_path: Path,
    section: dict[str, Any],
    model: dict[str, Any] | None = None,
    data_parallel: dict[str, Any] | None = None,
    **megatron: Any,
) -> Config:
    document = {
        "data": {"source": "mock", "tokenizer": "bytes"},
        "model": {"preset": "gpt-tiny", **(model or {})},
        "megatron": {"pipeline_model_parallel_size": 2, **megatron},
        "compression": {
            "pipeline_parallel": {"mode": "on", "rank": 16, **section},
            "data_parallel": data_parallel or {},
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return load(path)


@pytest.mark.parametrize(
    ("section", "megatron", "message"),
    [
        ({}, {"cuda_graph_impl": "local"}, "set megatron.cuda_graph_impl: none"),
        ({}, {"use_torch_fsdp2": True}, "set megatron.use_torch_fsdp2: false"),
        (
            {},
            {"overlap_moe_expert_parallel_comm": True},
            "set megatron.overlap_moe_expert_parallel_comm: false",
        ),
        ({}, {"pipeline_model_parallel_size": 1}, "no stage cut to put a boundary at"),
        ({"after_layers": [2, 400]}, {}, "[400] with"),
        ({"rank": 100000}, {}, "run.yaml:11: compression.pipeline_parallel.rank: 100000 with a "),
        (
            {"quantizer": {"forward": {"kind": "rvq", "width": 3}}},
            {},
            "rvq: width is 3, allowed are divisors of 16 (rank); the rank is 16",
        ),
    ],
)
def test_refused(
    tmp_path: Path, section: dict[str, Any], megatron: dict[str, Any], message: str
) -> None:
    (found,) = conflicts.check(config(tmp_path, section, **megatron))
    assert message in found
    assert conflicts.check(config(tmp_path, {**section, "mode": "off"}, **megatron)) == []


SUBSPACE = {"boundary": "subspace", "after_layers": [1]}
FITTING = {"hidden_dropout": 0.0}


@pytest.mark.parametrize(
    ("megatron", "message"),
    [
        ({}, "default: megatron.hidden_dropout: 0.1 (Megatron's default) does not go with"),
        ({**FITTING, "use_distributed_optimizer": True}, "flat shard holds parts of matrices"),
        ({**FITTING, "optimizer": "dist_muon"}, "allowed: adam, sgd or muon"),
        ({**FITTING, "num_experts": 4}, "experts are not constrained here; allowed: no experts"),
        ({**FITTING, "mtp_num_layers": 1}, "multi-token prediction lacks the fixed table"),
    ],
)
def test_what_a_subspace_network_cannot_have(
    tmp_path: Path, megatron: dict[str, Any], message: str
) -> None:
    (found,) = conflicts.check(config(tmp_path, SUBSPACE, ROPE, **megatron))
    assert message in found
    assert conflicts.check(config(tmp_path, SUBSPACE, ROPE, **FITTING)) == []
    positions, tied = conflicts.check(config(tmp_path, SUBSPACE, **FITTING))
    assert positions.startswith("preset gpt-tiny: model.position_embedding_type: ")
    assert "a tied output layer would be held in the subspace, too; allowed: true" in tied


def test_a_scripts_flags_are_refused_with_the_line_of_the_setting(tmp_path: Path) -> None:
    settings = config(tmp_path, {**SUBSPACE, "rank": 400, "after_layers": [9]})
    arguments = {
        "num_layers": 4,
        "hidden_size": 128,
        "position_embedding_type": "learned_absolute",
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": True,
    }
    depths, rank, positions = conflicts.check_arguments(settings, arguments)
    assert re.search(r"run\.yaml:\d+: compression\.\S+after_layers: \[9\] with 4 layers", depths)
    assert re.search(r"run\.yaml:\d+: compression\.\S+rank: 400 with a hidden size of 128", rank)
    assert re.search(r"^--position-embedding-type: .* \(\S+run\.yaml:\d+\)$", positions)


def test_tiles_of_tah_quant_divide_the_hidden_size(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"boundary": "tah_quant", "rank": None, "after_layers": [1]})
    (found,) = conflicts.check_arguments(loaded, {"num_layers": 4, "hidden_size": 96})
    assert "boundary: tah_quant with a hidden size of 96; its tiles need a multiple of 64" in found


@pytest.mark.parametrize(
    ("depths", "megatron", "missing"),
    [
        ([1, 3], {}, "the stages are cut after layers [2], and [2] are not among"),
        ([1], {"pipeline_model_parallel_layout": "Et|t*3L"}, None),
        ([2], {"pipeline_model_parallel_layout": "Et|t*3L"}, "cut after layers [1], and [1] are"),
        (
            [2],
            {"num_layers_per_virtual_pipeline_stage": 1, "overlap_p2p_comm": True},
            "cut after layers [1, 2, 3], and [1, 3] are not among",
        ),
    ],
)
def test_depths_have_to_meet_the_cuts_that_megatron_makes(
    tmp_path: Path, depths: list[int], megatron: dict[str, Any], missing: str | None
) -> None:
    batch = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1, "lr": 0.1}
    loaded = config(tmp_path, {"after_layers": depths}, **batch, **megatron)
    with CpuShim():
        args = parse(loaded, device="cpu", world_size=2)
    found = pipeline_conflicts.check_stages(loaded, args)
    if missing is None:
        assert found == []
    else:
        (line,) = found
        assert re.match(r"\S+run\.yaml:\d+: compression\.pipeline_parallel\.after_layers: ", line)
        assert missing in line


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, True),
        ({"anchors": "none"}, False),
        ({"after_layers": [2]}, False),
        ({"recompute_granularity": "selective"}, False),
        ({"fp8": None}, False),
    ],
)
def test_layers_that_transformer_engine_runs_again_have_no_anchors_within(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any], refused: bool
) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.training import argument_utils

    given = {"recompute_granularity": "full", "fp8": "hybrid", **changed}
    section = {key: given.pop(key) for key in ("anchors", "after_layers") if key in given}
    batch = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1, "lr": 0.1}
    loaded = config(tmp_path, {"after_layers": [1, 2], **section}, **batch)
    with CpuShim():
        args = parse(loaded, device="cpu", world_size=2)
    made = argument_utils.core_transformer_config_from_args(args)
    # Megatron makes none with FP8 where there is no Transformer Engine.
    vars(made).update(given)
    assert isinstance(made, TransformerConfig)
    monkeypatch.setattr(argument_utils, "core_transformer_config_from_args", lambda _: made)
    found = pipeline_conflicts.check_stages(loaded, args)
    if refused:
        (line,) = found
        assert "boundaries within a stage, [1], with anchors and full recomputation" in line
        assert "set recompute_granularity: selective, anchors: none, or depths at the" in line
    else:
        assert found == []


def test_codebooks_that_never_come_into_force_are_mentioned(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"quantizer": {"forward": {"kind": "rvq", "warmup_steps": 7}}})
    (note,) = pipeline_conflicts.notes(loaded, 7)
    assert "quantizer.forward.warmup_steps: 7 in a run of 7 steps: its messages are never" in note
    assert pipeline_conflicts.notes(loaded, 8) == []
    assert pipeline_conflicts.notes(loaded, None) == []


def test_steps_apart_with_sums_in_every_step(tmp_path: Path) -> None:
    """Replicas that step apart still agree on projectors and codebooks; noted, or refused."""
    apart = {"mode": "on", "gradients": {"compressor": "sparseloco"}}
    rvq = {"quantizer": {"forward": {"kind": "rvq", "warmup_steps": 1}}}
    for section, sums in (
        ({}, "boundary: mapl: gradients of projectors are summed over all replicas in every"),
        ({"boundary": "fixed", **rvq}, "boundary: fixed: statistics of codebooks are summed"),
        (rvq, "gradients of projectors and statistics of codebooks are summed"),
    ):
        loaded = config(tmp_path, section, data_parallel=apart)
        (note,) = conflicts.notes(loaded)
        assert "compression.data_parallel.gradients.compressor: sparseloco with " in note
        assert sums in note
        assert conflicts.check(loaded) == []
    assert conflicts.notes(config(tmp_path, {"boundary": "fixed"}, data_parallel=apart)) == []
    assert conflicts.notes(config(tmp_path, {}, data_parallel={"mode": "on"})) == []
    subspace = config(tmp_path, {"boundary": "subspace"}, data_parallel=apart)
    found = [line for line in conflicts.check(subspace) if "sparseloco does not go with" in line]
    assert len(found) == 1
    assert "take weights out of the subspace" in found[0]


def test_in_place_needs_depths_alone(tmp_path: Path) -> None:
    loaded = config(tmp_path, {"after_layers": [1]}, pipeline_model_parallel_size=1)
    assert conflicts.check(loaded) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"after_layers": [3, 2]}, "numbers of layers from 1, ascending"),
        ({"after_layers": []}, "numbers of layers from 1, ascending"),
        (
            {"boundary": "taco"},
            "rank: 16 has no effect: boundary: taco has no rank; remove the key",
        ),
        (
            {"boundary": "residual_bottleneck", "anchors": "full"},
            "anchors: 'full': boundary: residual_bottleneck has no anchors; allowed: none",
        ),
        (
            {"boundary": "fixed", "lr": 0.1},
            "lr: 0.1 has no effect: boundary: fixed has no projector that learns",
        ),
        (
            {"boundary": "residual_bottleneck", "check_every": 9},
            "check_every: 9 has no effect: boundary: residual_bottleneck keeps nothing at both",
        ),
        ({"move_every": 9}, "move_every: 9 has no effect: boundary: mapl has no subspace that"),
        ({"boundary": "subspace", "anchors": "full"}, "anchors: 'full': boundary: subspace has"),
        ({"boundary": "maple"}, "nearest: mapl"),
        ({"lr": 0.3}, "lr: 0.3 is out of range; allowed: at most 0.25"),
        (
            {"quantizer": {"backward": {"kind": "rvq"}}},
            "quantizer.backward.kind: 'rvq' is not allowed; allowed: none, int8, int4, e4m3",
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
