"""The collectives on NCCL: ranks that share one GPU, each with a host of its own for NCCL."""

import sys
from dataclasses import replace

import pytest

from megatron_taco.lab.launch import launch
from megatron_taco.lab.places import loopback_places

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("world_size", "connections"), [(2, "1"), (3, "1"), (4, "1"), (8, "1"), (4, "8")]
)
def test_collectives(world_size: int, connections: str) -> None:
    """The oracle's bits, memory, streams and CUDA graphs, with one hardware queue and many."""
    extra = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    places = [
        replace(place, environment={**place.environment, **extra})
        for place in loopback_places(world_size, gpus="share")
    ]
    command = [sys.executable, "-m", "tests.gpu.collective_checks"]
    assert launch(command, places, timeout_s=240) == 0
