"""The compressor gives the same bytes on a GPU as on a CPU, without synchronising."""

import itertools

import pytest
import torch

from megatron_taco.compressors import Taco

pytestmark = pytest.mark.gpu

FORMATS = ("e4m3", "e5m2", "int8", "int6", "int4")
SCALES = ("dual", "merged_fp32", "merged_bf16")


def hard_data(seed: int, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes over 40 binary orders, a NaN, an Inf, zero blocks; deterministic by seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, numel, generator=generator)
    steps = torch.randn(rows, -(-numel // 100), generator=generator)
    x *= steps.mul(12).exp2().repeat_interleave(100, 1)[:, :numel]
    x[1, 5000] = float("nan")
    x[2, 7000] = float("inf")
    x[:, 2000:2600] = 0
    return x.to(dtype)


def same(on_gpu: torch.Tensor, on_cpu: torch.Tensor) -> bool:
    on_gpu = on_gpu.cpu()
    if on_cpu.is_floating_point():
        return torch.equal(on_gpu.nan_to_num(7.0), on_cpu.nan_to_num(7.0)) and torch.equal(
            on_gpu.isnan(), on_cpu.isnan()
        )
    return torch.equal(on_gpu, on_cpu)


def everything(taco: Taco, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    numel = x.shape[1]
    payloads = taco.encode_rows(x)
    return (
        payloads,
        taco.decode_rows(payloads, numel, x.dtype),
        taco.decode_sum(payloads, numel),
        taco.reduce_encode(payloads, numel),
        taco.nonfinite_blocks(payloads, numel),
    )


def differing(taco: Taco, x: torch.Tensor) -> list[str]:
    """Return which results on the GPU are not those of plain torch on the CPU."""
    on_gpu = x.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = everything(taco, on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = ("encode", "decode", "decode_sum", "reduce_encode", "nonfinite_blocks")
    expected = everything(taco.reference(), x)
    pairs = zip(names, results, expected, strict=True)
    return [name for name, found, wanted in pairs if not same(found, wanted)]


@pytest.mark.parametrize(
    ("form", "scales"), itertools.product(FORMATS, SCALES), ids=lambda value: str(value)
)
def test_bytes_and_values_are_those_of_the_cpu(form: str, scales: str) -> None:
    """Plain torch with every dtype; the kernels, which have to be compiled, in turns."""
    seed = torch.seed() % 2**31
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for k, (block, rotation) in enumerate(itertools.product((32, 256, 512), ("hadamard", "none"))):
        taco = Taco(form, block, rotation, scales)
        for dtype in dtypes:
            x = hard_data(seed, 4, 100_003, dtype)
            assert differing(taco.reference(), x) == [], (taco, dtype, f"seed {seed}, torch")
        dtype = dtypes[(k + FORMATS.index(form)) % 3]
        x = hard_data(seed, 4, 100_003, dtype)
        assert differing(taco, x) == [], (taco, dtype, f"seed {seed}, kernels")
