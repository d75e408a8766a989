"""Run by test_kernels.py under TRITON_INTERPRET=1: the kernels against plain torch, on the CPU.

Arguments: a seed and a share, "k/n": the arms k, k + n, k + 2n ... are checked.
"""

import itertools
import sys
import warnings

import torch

from megatron_taco.compressors import Taco
from megatron_taco.compressors.taco import BLOCKS, ROTATIONS, SCALES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = 7


def arms() -> list[tuple[Taco, torch.dtype, int]]:
    """Every format and scale with every dtype; blocks, rotations and odd sizes take turns."""
    found = []
    pairs = itertools.product(("e4m3", "e5m2", "int8", "int6", "int4"), SCALES, DTYPES)
    for k, (form, scales, dtype) in enumerate(pairs):
        block = BLOCKS[k % len(BLOCKS)]
        rotation = ROTATIONS[k // 2 % 2]
        numel = 2 * block + (ODD, 0, -ODD)[k // len(BLOCKS) % 3]
        found.append((Taco(form, block, rotation, scales), dtype, numel))
    return found


def hard_data(rows: int, numel: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes over many binary orders, NaN, Inf, zero blocks, tiny and huge blocks."""
    steps = torch.randn(rows, -(-numel // 9)).mul(14).exp2()
    x = torch.randn(rows, numel) * steps.repeat_interleave(9, 1)[:, :numel]
    x[0, 3] = float("nan")
    x[1, block + 1] = -float("inf")
    x[2, :block] = 0
    x[2, block:] *= 2.0**-130
    x[1, :block] *= 2.0**100
    x[0, block:] = x[0, block:].round()  # many equal values: sums that cancel
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as integers, all NaNs alike, so that signs of zero count."""
    if not x.is_floating_point():
        return x
    integers = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    return torch.where(x.isnan(), torch.iinfo(integers.dtype).max, integers)


def unaligned(payloads: torch.Tensor, shift: int, gap: int) -> torch.Tensor:
    """Return a copy at an address that is odd in every sense, with a gap after each row."""
    rows, size = payloads.shape
    memory = torch.zeros(shift + rows * (size + gap), dtype=torch.uint8)
    view = memory[shift:].view(rows, size + gap)[:, :size]
    view.copy_(payloads)
    return view


def check(taco: Taco, dtype: torch.dtype, numel: int) -> list[str]:
    """Return what differs between kernels and torch, by name."""
    torch_only = taco.reference()
    x = hard_data(3, numel, taco.block, dtype)
    wide = torch.zeros(3, numel + 5, dtype=dtype)
    wide[:, :numel] = x
    payloads = torch_only.encode_rows(x)
    odd = unaligned(payloads, 1, 2)
    pairs = {
        "encode": (torch_only.encode_rows(x), taco.encode_rows(wide[:, :numel])),
        "decode": (
            torch_only.decode_rows(payloads, numel, dtype),
            taco.decode_rows(payloads, numel, dtype),
        ),
        "decode, odd address": (
            torch_only.decode_rows(payloads, numel, dtype),
            taco.decode_rows(odd, numel, dtype),
        ),
        "decode_sum": (
            torch_only.decode_sum(payloads, numel),
            taco.decode_sum(payloads, numel),
        ),
        "reduce_encode": (
            torch_only.reduce_encode(payloads, numel),
            taco.reduce_encode(odd, numel),
        ),
        "reduce_encode of opposites": (
            torch_only.reduce_encode(torch_only.encode_rows(torch.stack((x[1], -x[1]))), numel),
            taco.reduce_encode(torch_only.encode_rows(torch.stack((x[1], -x[1]))), numel),
        ),
    }
    return [name for name, (a, b) in pairs.items() if not torch.equal(bits(a), bits(b))]


def main() -> int:
    """Check a share of the arms; 1 if something differs."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # NumPy's, about infinities
    seed, (share, shares) = int(sys.argv[1]), map(int, sys.argv[2].split("/"))
    failures = 0
    chosen = arms()[share::shares]
    for k, (taco, dtype, numel) in enumerate(chosen):
        torch.manual_seed(seed + k)
        wrong = check(taco, dtype, numel)
        failures += bool(wrong)
        if wrong:
            print(f"{taco} {dtype} numel {numel} seed {seed + k}: {', '.join(wrong)} differ")
    print(f"{len(chosen)} arms checked, {failures} differ")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
