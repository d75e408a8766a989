"""Direct peer reads: on a GPU for each rank where there are enough, else on one for all."""

import sys
from dataclasses import replace

import pytest

from megatron_taco.collectives.peers import OVERLAP_VARIABLE
from megatron_taco.lab.launch import launch
from megatron_taco.lab.places import loopback_places, visible_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world_size", [2, 4])
def test_peer_reads(world_size: int) -> None:
    """The bits of the one-shot on all ranks, back to back, on several streams, async."""
    share = len(visible_gpus()) < world_size
    extra = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        **({OVERLAP_VARIABLE: "1"} if share else {}),
    }
    places = [
        replace(place, environment={**place.environment, **extra})
        for place in loopback_places(world_size, gpus="share" if share else "own")
    ]
    command = [sys.executable, "-m", "tests.gpu.peer_checks"]
    assert launch(command, places, timeout_s=240) == 0
