"""Hooks inside the real Transformer Engine, on NCCL: two ranks that share one GPU."""

import sys
from dataclasses import replace

import pytest

from megatron_taco.lab.launch import launch
from megatron_taco.lab.places import loopback_places

pytestmark = pytest.mark.gpu


def test_every_collective_of_its_linears_has_its_role() -> None:
    """As ``tests/distributed/test_transformer_engine.py``, with its own products and norm."""
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    extra = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    places = [
        replace(place, environment={**place.environment, **extra})
        for place in loopback_places(2, gpus="share")
    ]
    assert launch([sys.executable, "-m", "tests.gpu.te_checks"], places, timeout_s=240) == 0
