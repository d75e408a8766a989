"""``megatron_taco.install`` in a loop of one's own over ``megatron.core``."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_taco
from megatron_taco.config import ConfigError
from tests.distributed.training import metrics
from tests.ranks import RankRunner

STEPS = 3
SETTINGS = {"compression": {"tensor_parallel": {"mode": "on", "min_bytes": "1KiB"}}}


def loop(taco: Any, run_dir: str, steps: int = STEPS) -> list[float]:
    """Train a GPT of two layers over ``megatron.core``; with ``taco`` None without us."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, tensor_model_parallel_size=2,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, persist_layer_norm=False, pipeline_dtype=torch.float32,
    )  # fmt: skip
    if taco is not None:
        taco.start(config, position_embedding_type="rope")
    torch.manual_seed(1)
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32,
        position_embedding_type="rope",
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(2 * 33).view(2, 33) % 128
    positions = torch.arange(32).expand(2, 32)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    if taco is None:
        return [step() for _ in range(steps)]
    found = []
    for number in range(steps):
        with taco.step(number):
            found.append(step())
    taco.finish()
    return found


def with_us(rank: int, world_size: int, settings: Any, run_dir: str) -> list[float]:
    from megatron.core.tensor_parallel import layers, mappings

    before = layers.torch, mappings.torch, torch.cuda.current_device
    with megatron_taco.install(settings, run_dir=run_dir, device="cpu") as taco:
        losses = loop(taco, run_dir)
        assert layers.torch is not before[0]
    assert (layers.torch, mappings.torch, torch.cuda.current_device) == before
    return losses


def without_us(rank: int, world_size: int) -> list[float]:
    from megatron_taco.patching.cpu import CpuShim

    with CpuShim():
        return loop(None, "")


def test_a_loop_of_ones_own(run_ranks: RankRunner, tmp_path: Path) -> None:
    plain = run_ranks(without_us, 2, preload="megatron")[0]
    on = run_ranks(with_us, 2, SETTINGS, str(tmp_path / "run"), preload="megatron")[0]
    assert on != plain
    assert all(abs(a - b) < 0.005 * b for a, b in zip(on, plain, strict=True))
    (end,) = metrics(tmp_path)
    assert end["event"] == "end"
    # Two layers with two linears each way, on two ranks.
    for role in ("tp.forward", "tp.backward"):
        flow = end["flows"][f"{role} all_reduce"]
        assert flow["calls"] == flow["compressed"] == 2 * 2 * 2 * STEPS
    assert (tmp_path / "run" / "config.yaml").is_file()


def too_small(rank: int, world_size: int, run_dir: str) -> None:
    from megatron_taco.patching.flows import FlowCheckError

    settings = {"compression": {"tensor_parallel": {"mode": "on"}}}
    auto = {"compression": {"tensor_parallel": {"mode": "auto"}}}
    with megatron_taco.install(auto) as taco, pytest.raises(ConfigError, match="set mode: on"):
        taco.start(SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=False))
    with megatron_taco.install(settings, run_dir=run_dir, device="cpu") as taco:
        with pytest.raises(RuntimeError, match="call start"), taco.step(0):
            pass
        with pytest.raises(FlowCheckError, match="never compressed"):
            loop(taco, run_dir)


def test_what_is_never_compressed_fails_the_loop(run_ranks: RankRunner, tmp_path: Path) -> None:
    run_ranks(too_small, 2, str(tmp_path / "run"), preload="megatron")


def test_install_refuses_mistakes_at_once() -> None:
    with pytest.raises(ConfigError, match="allowed: None and 'cpu'"):
        megatron_taco.install(SETTINGS, device="tpu")
    with pytest.raises(ConfigError, match=re.escape("block: 100 is not a block size")):
        megatron_taco.install({"compression": {"tensor_parallel": {"block": 100}}})
