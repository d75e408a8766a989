"""Presets: the numbers of parameters that were published, and those of Megatron's own model."""

import random
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.config import PRESETS, count_parameters, load
from megatron_taco.config.presets import PUBLISHED
from megatron_taco.patching import conflicts

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("qwen")])
def test_published_counts_are_met_exactly(name: str) -> None:
    arguments = PRESETS[name]
    assert count_parameters(arguments, arguments["vocab_size"]) == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("qwen")])
def test_nominal_counts_are_met_within_two_percent(name: str) -> None:
    arguments = PRESETS[name]
    count = count_parameters(arguments, arguments["vocab_size"])
    assert count == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize(
    ("name", "vocabulary", "positions", "published"),
    [
        ("gpt-350m", 50257, 1024, 354_823_168),  # GPT-2 medium
        ("gpt-1.3b", 50272, 2050, 1_315_758_080),  # OPT-1.3B
        ("gpt-6.7b", 50272, 2050, 6_658_473_984),  # OPT-6.7B
    ],
)
def test_released_models_of_the_same_shape_have_the_same_count(
    name: str, vocabulary: int, positions: int, published: int
) -> None:
    arguments = {**PRESETS[name], "max_position_embeddings": positions}
    assert count_parameters(arguments, vocabulary) == published


def test_every_preset_is_a_valid_model_section(tmp_path: Path) -> None:
    for name, arguments in PRESETS.items():
        path = tmp_path / "x.yaml"
        path.write_text(f"data: {{source: mock}}\nmodel: {{preset: {name}}}")
        assert load(path).model.arguments() == arguments


def test_every_published_preset_has_a_configuration_file() -> None:
    three_axes = {"3d-demo-cpu", "3d-gpt-350m", "3d-llama-1b"}
    pipelines = {"pipeline-demo-cpu", "pipeline-llama-150m"}
    expected = {"demo-cpu", *three_axes, *pipelines, *PUBLISHED}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == expected
    for name in pipelines:
        config = load(CONFIGS / f"{name}.yaml")
        assert config.run.name == name
        assert config.compression.pipeline_parallel.enabled
        assert conflicts.check(config) == []
    for name in three_axes:
        config = load(CONFIGS / f"{name}.yaml")
        assert config.run.name == name
        assert config.compression.tensor_parallel.enabled
        assert config.compression.data_parallel.gradients.compressor == "sdp4bit"
        assert config.compression.data_parallel.weights.compressor == "sdp4bit"
    for name in PUBLISHED:
        config = load(CONFIGS / f"{name}.yaml")
        assert config.model.preset == name
        assert config.run.name == name


TINY = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def tiny(name: str) -> dict[str, Any]:
    """Return the preset's kind of model, small: sizes shrink, switches stay."""
    arguments = {**PRESETS[name], **TINY}
    for size, small in (("num_query_groups", 2), ("kv_channels", 10), ("ffn_hidden_size", 40)):
        if size in arguments:
            arguments[size] = small
    return arguments


def random_architecture(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    bias = draw.random() < 0.5
    arguments = {
        **TINY,
        "ffn_hidden_size": draw.choice([None, 20]),
        "kv_channels": draw.choice([None, 6, 10]),
        "num_query_groups": draw.choice([None, 1, 2, 4]),
        "position_embedding_type": draw.choice(["learned_absolute", "rope", "none"]),
        "normalization": draw.choice(["LayerNorm", "RMSNorm"]),
        "swiglu": draw.random() < 0.5,
        "add_bias_linear": bias,
        "add_qkv_bias": bias or draw.random() < 0.5,
        "qk_layernorm": draw.random() < 0.5,
        "untie_embeddings_and_output_weights": draw.random() < 0.5,
    }
    return {key: value for key, value in arguments.items() if value is not None}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Megatron's parallel state for a single process on the CPU."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def real_count(arguments: dict[str, Any], vocabulary: int) -> int:
    """Return the number of parameters of Megatron's GPT model itself."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    same_name = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    same_name += ("kv_channels", "normalization", "add_bias_linear", "add_qkv_bias")
    same_name += ("qk_layernorm", "num_query_groups")
    sizes = {key: arguments[key] for key in same_name if key in arguments}
    swiglu = arguments.get("swiglu", False)
    if swiglu and "ffn_hidden_size" not in sizes:
        sizes["ffn_hidden_size"] = int((4 * sizes["hidden_size"] * 2 / 3) / 64) * 64
    config = TransformerConfig(
        **sizes,
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=arguments.get("qk_layernorm", False),
            normalization=arguments.get("normalization"),
        ),
        vocab_size=vocabulary,
        max_sequence_length=arguments["max_position_embeddings"],
        position_embedding_type=arguments["position_embedding_type"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
    )
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.usefixtures("one_rank")
def test_the_formula_counts_what_megatron_builds() -> None:
    families = [tiny(name) for name in PRESETS]
    for arguments in families + [random_architecture(seed) for seed in range(40)]:
        assert count_parameters(arguments, 64) == real_count(arguments, 64), arguments
