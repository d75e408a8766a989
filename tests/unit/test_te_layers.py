"""Layers with Transformer Engine's attention and norms, and models that no hook reaches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_taco.config import ConfigError, load
from megatron_taco.patching.errors import PatchError
from megatron_taco.patching.transformer_engine import check_model, quantised_gathers
from megatron_taco.training import extras

CONFIG = """\
data: {source: mock, tokenizer: bytes}
model: {preset: gpt-tiny}
megatron: {tensor_model_parallel_size: 2, micro_batch_size: 2, global_batch_size: 4, train_iters: 2}
compression: {tensor_parallel: {mode: on}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("asked", "install"),
    [
        ("model.attention=te", "pip install --no-build-isolation 'megatron-taco[te]'"),
        ("megatron.transformer_impl=transformer_engine", "'megatron-taco[te]', or set local"),
        ("telemetry.wandb={project: p}", "pip install 'megatron-taco[wandb]', or leave it out"),
        ("telemetry.tensorboard=true", "pip install 'megatron-taco[tensorboard]'"),
    ],
)
def test_a_package_that_is_not_installed_is_one_line(
    file: Path, asked: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (problem,) = extras.missing(load(file, [asked]))
    text = str(problem)
    assert asked.split("=")[0] in text
    assert "is not installed; " in text
    assert install in text
    assert extras.missing(load(file)) == []
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    assert extras.missing(load(file, [asked])) == []


def test_auto_leaves_transformer_engines_layers_to_megatron(file: Path) -> None:
    model = load(file).model
    assert model.layers(None) == model.layers("local") == "sdpa"
    assert model.layers("transformer_engine") == "megatron"
    te = load(file, ["model.attention=te"]).model
    assert te.layers("local") == "te"
    with pytest.raises(ConfigError, match="te has Megatron's linears"):
        load(file, ["model.attention=te", "megatron.transformer_impl=transformer_engine"])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_only_attention_and_norms_are_transformer_engines(
    qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_taco.training import model
    from megatron_taco.training.model import layer_spec

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, qk_layernorm=qk_norm
    )
    if not transformer_engine.HAVE_TE:
        with pytest.raises(ConfigError, match="te_block_spec: Transformer Engine is not installed"):
            layer_spec(config, "te")
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    monkeypatch.setattr(model, "get_num_layers_to_build", lambda *_: 2)  # asks for process groups
    block: Any = model.te_block_spec(SimpleNamespace(transformer=config))
    assert block.layer_norm is transformer_engine.TENorm
    assert len(block.layer_specs) == 2
    layer: Any = layer_spec(config, "te").submodules
    assert str(block.layer_specs[1].submodules) == str(layer)
    attention = layer.self_attention.submodules
    norms = [layer.input_layernorm, layer.pre_mlp_layernorm]
    norms += [attention.q_layernorm, attention.k_layernorm] if qk_norm else []
    assert set(norms) == {transformer_engine.TENorm}
    assert attention.core_attention is transformer_engine.TEDotProductAttention
    mlp = getattr(layer.mlp, "submodules", None) or layer.mlp.keywords["submodules"]
    assert {attention.linear_qkv, mlp.linear_fc1} == {ColumnParallelLinear}
    assert {attention.linear_proj, mlp.linear_fc2} == {RowParallelLinear}


def te_model(name: str, module: str = "linear", **attributes: Any) -> torch.nn.Module:
    """A model with one layer of a class of that name, as if Transformer Engine had made it."""
    path = f"transformer_engine.pytorch.module.{module}"
    base = type(name, (torch.nn.Module,), {"__module__": path})
    layer = type(f"TE{name}", (base,), {"__module__": "megatron.core.extensions"})()
    for key, value in {"parallel_mode": "row", "tp_size": 2, **attributes}.items():
        setattr(layer, key, value)
    return torch.nn.ModuleDict({"proj": layer})


def test_models_that_sum_where_no_hook_is_are_refused_by_name() -> None:
    check_model(te_model("Linear"), hooked=True)
    check_model(te_model("Linear", tp_size=1), hooked=False)
    check_model(te_model("GroupedLinear"), hooked=False)  # it communicates nothing
    for model, hooked, text in (
        (
            te_model("Linear", ub_overlap_rs_fprop=True),
            True,
            "proj (TELinear): ub_overlap",
        ),
        (te_model("Linear", symmetric_ar_type="two_shot"), True, "symmetric_ar_type two_shot"),
        (te_model("LayerNormMLP", set_parallel_mode=True), True, "use its Linear or"),
        (te_model("Linear"), False, "proj (TELinear): this layer of Transformer Engine"),
    ):
        with pytest.raises(PatchError) as caught:
            check_model(model, hooked=hooked)
        assert text in str(caught.value)
        assert "compression off" in str(caught.value)


def test_fp8_gathers_are_transformer_engines_own() -> None:
    assert quantised_gathers(SimpleNamespace(fp8="hybrid"))
    assert quantised_gathers(SimpleNamespace(fp8=None, fp4="e2m1"))
    assert not quantised_gathers(SimpleNamespace(fp8=None, fp4=None))
    assert not quantised_gathers(SimpleNamespace())
