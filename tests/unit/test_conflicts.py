"""Features that compression cannot see into are refused, naming the line and what to change."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_taco.config import Config, load, load_settings
from megatron_taco.patching import conflicts


def config(tmp_path: Path, mode: str = "on", **megatron: Any) -> Config:
    arguments = {"tensor_model_parallel_size": 2, **megatron}
    document = {
        "data": {"source": "mock", "tokenizer": "bytes"},
        "model": {"preset": "gpt-tiny"},
        "megatron": arguments,
        "compression": {"tensor_parallel": {"mode": mode}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return load(path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_comm_overlap": True}, "tp_comm_overlap: false"),
    ({"transformer_impl": "inference_optimized"}, "transformer_impl: local"),
    ({"use_transformer_engine_op_fuser": True}, "use_transformer_engine_op_fuser: false"),
    ({"symmetric_ar_type": "two_shot"}, "remove megatron.symmetric_ar_type"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl: none"),
    ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl: none"),
    ({"enable_cuda_graph": True}, "remove megatron.enable_cuda_graph"),
    ({"external_cuda_graph": True}, "remove megatron.external_cuda_graph"),
    ({"use_megatron_fsdp": True}, "use_megatron_fsdp: false"),
    ({"use_custom_fsdp": True}, "remove megatron.use_custom_fsdp"),
    ({"use_torch_fsdp2": True}, "use_torch_fsdp2: false"),
    ({"tensor_parallel_num_weight_shards": 4}, "tensor_parallel_num_weight_shards: 2"),
    (
        {"expert_tensor_parallel_size": 1, "expert_tensor_parallel_num_weight_shards": 2},
        "expert_tensor_parallel_num_weight_shards: 1",
    ),
]


@pytest.mark.parametrize(("arguments", "change"), REFUSED)
def test_refused_with_line_reason_and_change(
    tmp_path: Path, arguments: dict[str, Any], change: str
) -> None:
    loaded = config(tmp_path, **arguments)
    (message,) = conflicts.check(loaded)
    key = f"megatron.{list(arguments)[-1]}"
    assert message.startswith(f"{loaded.where(key)}: {key}: ")
    assert change in message
    assert conflicts.check(config(tmp_path, mode="off", **arguments)) == []


def test_transformer_engine_goes_with_compression_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = config(tmp_path, transformer_impl="transformer_engine")
    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    (message,) = conflicts.check(loaded)
    assert "Transformer Engine is not installed; set megatron.transformer_impl: local" in message
    monkeypatch.setattr(conflicts, "find_spec", lambda name: object())
    assert conflicts.check(loaded) == []
    overrides = ["compression.tensor_parallel.forward_chunks=4"]
    (message,) = conflicts.check(load(tmp_path / "run.yaml", overrides))
    assert "cannot be made in parts" in message
    settings = load_settings(None, ["compression.tensor_parallel.mode=on", *overrides])
    flags = {"tensor_model_parallel_size": 2, "transformer_impl": "transformer_engine"}
    (message,) = conflicts.check_arguments(settings, flags)
    assert message.startswith("compression.tensor_parallel.forward_chunks: 4 (command line")


def test_one_rank_has_nothing_to_compress(tmp_path: Path) -> None:
    loaded = config(tmp_path, tensor_model_parallel_size=1)
    (message,) = conflicts.check(loaded)
    assert message.startswith(loaded.where("compression.tensor_parallel.mode"))
    assert "nothing to compress" in message
    assert conflicts.check(config(tmp_path, mode="off", tensor_model_parallel_size=1)) == []


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    assert conflicts.check(config(tmp_path, tensor_model_parallel_size=2.0)) == []
    loaded = config(tmp_path, tensor_parallel_num_weight_shards=4.0)
    (message,) = conflicts.check(loaded)
    assert "tensor_parallel_num_weight_shards: 4 does not go with" in message
    assert "over a tensor-parallel size of 2 it shards weights further" in message
    (note,) = conflicts.notes(config(tmp_path, expert_model_parallel_size=2.0))
    assert "all-to-all" in note


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence_parallel": True},
        {"transformer_impl": "local", "cuda_graph_impl": "none", "tp_comm_overlap": False},
        {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        {"recompute_granularity": "full"},
        {"tensor_parallel_num_weight_shards": 2},
    ],
)
def test_what_goes_together_passes_without_a_word(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    loaded = config(tmp_path, **arguments)
    assert conflicts.check(loaded) == conflicts.notes(loaded) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"expert_model_parallel_size": 2, "num_experts": 4}, "all-to-all"),
        ({"num_experts": 4}, "all-to-all"),
        ({"distribute_saved_activations": True}, "saved activations"),
        ({"defer_embedding_wgrad_compute": True}, "after the pipeline"),
    ],
)
def test_what_stays_exact_is_noted_and_not_refused(
    tmp_path: Path, arguments: dict[str, Any], word: str
) -> None:
    loaded = config(tmp_path, **arguments)
    assert conflicts.check(loaded) == []
    (note,) = conflicts.notes(loaded)
    assert word in note
    assert conflicts.notes(config(tmp_path, mode="off", **arguments)) == []


def test_all_reasons_come_at_once(tmp_path: Path) -> None:
    loaded = config(tmp_path, tp_comm_overlap=True, use_torch_fsdp2=True)
    assert len(conflicts.check(loaded)) == 2


def test_a_scripts_flags_are_refused_by_their_own_names() -> None:
    settings = load_settings(None, ["compression.tensor_parallel.mode=on"])
    arguments = {"tensor_model_parallel_size": 2}
    assert conflicts.check_arguments(settings, arguments) == []
    for given, found, change in (
        ({"tp_comm_overlap": True}, "--tp-comm-overlap does", "leave --tp-comm-overlap out"),
        (
            {"transformer_impl": "inference_optimized"},
            "--transformer-impl inference_optimized does",
            "give --transformer-impl local, or compression off",
        ),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph does", "leave --enable-cuda-graph out"),
    ):
        (message,) = conflicts.check_arguments(settings, {**arguments, **given})
        assert message.startswith(found)
        assert change in message
        assert "megatron." not in message
    off = load_settings(None, ["compression.tensor_parallel.mode=off"])
    assert conflicts.check_arguments(off, {"tp_comm_overlap": True}) == []
    (message,) = conflicts.check_arguments(settings, {})
    assert "nothing to compress" in message


def test_a_model_configuration_says_what_loops_over_megatron_core_do() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_taco.drop_in.facts import facts_of_model

    model_config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, tensor_model_parallel_size=2
    )
    assert conflicts.refusals(facts_of_model(model_config, "rope", None).arguments) == []
    model_config.cuda_graph_impl = "local"
    model_config.use_transformer_engine_op_fuser = True
    model_config.tp_comm_overlap = True
    found = conflicts.refusals(facts_of_model(model_config, "rope", None).arguments)
    assert {refusal.key for refusal in found} == {
        "cuda_graph_impl",
        "use_transformer_engine_op_fuser",
        "tp_comm_overlap",
    }
