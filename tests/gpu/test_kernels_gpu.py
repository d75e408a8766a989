"""The kernels on a GPU: the bytes of plain torch on the CPU, no synchronisation, no memory."""

import time

import pytest
import torch

from megatron_taco.compressors import Taco
from tests.unit.interpreted_kernels import arms, check

pytestmark = pytest.mark.gpu

ARMS = arms(1500)


@pytest.mark.parametrize("arm", range(len(ARMS)))
def test_kernels_give_the_bytes_of_torch(arm: int) -> None:
    taco, dtype, numel = ARMS[arm]
    seed = time.time_ns() % 2**31
    torch.manual_seed(seed)
    assert check(taco, dtype, numel, "cuda") == [], f"{taco} {dtype} numel {numel} seed {seed}"


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_software_fp8_as_below_capability_8_9(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_taco.kernels import launch

    monkeypatch.setattr(launch, "conversion_mode", lambda device: int(launch.PTX.value))
    seed = time.time_ns() % 2**31
    torch.manual_seed(seed)
    assert check(Taco(form), torch.bfloat16, 256 * 500, "cuda") == [], f"seed {seed}"


def test_nothing_synchronises_and_only_results_are_allocated() -> None:
    taco, numel = Taco(), 256 * 4000
    x = torch.randn(4, numel, device="cuda", dtype=torch.bfloat16)
    payloads = taco.encode_rows(x)
    calls = (
        lambda: taco.encode_rows(x),
        lambda: taco.decode_rows(payloads, numel, torch.bfloat16),
        lambda: taco.decode_sum(payloads, numel),
        lambda: taco.reduce_encode(payloads, numel),
    )
    for call in calls:
        result = call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            other = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        assert peak - before == other.numel() * other.element_size()
        assert torch.equal(other, result)


def test_kernels_can_be_captured_in_a_graph() -> None:
    taco = Taco("int6")
    x = torch.randn(2, 256 * 64, device="cuda", dtype=torch.bfloat16)
    taco.encode_rows(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        payloads = taco.encode_rows(x)
    x.normal_()
    graph.replay()
    assert torch.equal(payloads.cpu(), taco.reference().encode_rows(x.cpu()))


def test_warm_up_compiles_what_is_needed_later() -> None:
    from megatron_taco.kernels import launch

    taco = Taco("int8", 128, "hadamard", "merged_fp32")
    device = torch.device("cuda", torch.cuda.current_device())
    assert taco.has_kernels(device)
    lines = taco.warm_up([(3, 128 * 1001)], [torch.float16], device)
    assert len(lines) == 5
    cache = launch.encode_kernel.device_caches[device.index][0]
    compiled = len(cache)
    taco.encode_rows(torch.randn(3, 128 * 1001, device=device, dtype=torch.float16))
    assert len(cache) == compiled
