"""What a trace says about communication that hides behind compute."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.lab.trace import Kernel, kernels_of, main, overlap, read_kernels, traced_ms

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN"
MAIN, AUTOGRAD = 1, 2


def event(name: str, start: float, end: float, correlation: int, thread: int) -> list[Any]:
    """A kernel and its launch 5 us earlier."""
    args = {"correlation": correlation}
    return [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start,
         "dur": end - start, "args": args},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 99, "tid": thread,
         "ts": start - 5, "dur": 2, "args": args},
    ]  # fmt: skip


def synthetic() -> list[Any]:
    """Forward: a product to 1000, a message to 2000. Backward: a message under two kernels."""
    mark = "autograd::engine::evaluate_function: LinearBackward"
    return [
        {"ph": "M", "name": "process_name", "pid": 0},
        {"ph": "X", "cat": "cpu_op", "name": mark, "pid": 99, "tid": AUTOGRAD, "ts": 0, "dur": 1},
        *event(GEMM, 0, 1000, 1, MAIN),
        *event(NCCL, 1000, 2000, 2, MAIN),
        *event(NCCL, 3000, 5000, 3, AUTOGRAD),
        *event("ampere_bf16_s16816gemm_bf16_128x128", 3500, 4500, 4, AUTOGRAD),
        *event("vectorized_elementwise_kernel", 4400, 4700, 5, AUTOGRAD),
        *event(NCCL, 4900, 6000, 6, AUTOGRAD),
    ]


def test_shares_of_a_synthetic_trace() -> None:
    kernels = kernels_of(synthetic())
    assert traced_ms(kernels) == 6.0
    forward = overlap(kernels, backward=False)
    assert (forward.kernels, forward.communication, forward.hidden) == (1, 1.0, 0.0)
    assert forward.with_product == 0, "one that ends where the message starts is not beside it"
    assert forward.exposed == 1.0
    backward = overlap(kernels, backward=True)
    assert (backward.kernels, backward.with_product, backward.communication) == (2, 1, 3.0)
    assert backward.under_products == pytest.approx(1.0)
    assert backward.hidden == pytest.approx(1.2)
    both = overlap(kernels)
    assert both.communication == 4.0
    assert both.exposed == pytest.approx(2.8)


def test_kernels_side_by_side_count_once() -> None:
    kernels = [
        Kernel(NCCL, 0, 10_000, False),
        Kernel(GEMM, 1000, 4000, False),
        Kernel(GEMM, 2000, 5000, False),
        Kernel("reduce_kernel", 3000, 6000, False),
    ]
    found = overlap(kernels)
    assert (found.communication, found.under_products, found.hidden) == (10.0, 4.0, 5.0)


def test_attention_is_no_matrix_product() -> None:
    name = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>"
    assert Kernel(name, 0, 1, False).kind == "other"
    assert Kernel(GEMM, 0, 1, False).kind == "product"
    assert Kernel(NCCL, 0, 1, False).kind == "communication"


def test_table_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank-0.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": synthetic()}, file)
    assert len(read_kernels(path)) == 6
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "6 kernels in 6.0 ms" in out
    assert "| forward and rest | 1 | 0 | 1.00 | 0.0% | 0.0% | 1.00 | 0.167 |" in out
    assert "| backward | 2 | 1 | 3.00 | 33.3% | 40.0% | 1.80 | 0.300 |" in out


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("not json", "cannot be read as a trace"),
        ("{}", "no traceEvents"),
        ('{"traceEvents": []}', "holds no GPU kernel"),
    ],
)
def test_what_is_no_trace_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, found: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert found in error
    assert str(path) in error
    assert error.count("\n") == 1
