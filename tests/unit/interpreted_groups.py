"""The kernels of block integers against plain torch: by Triton's interpreter, or on a GPU.

test_group_kernels.py runs this file under TRITON_INTERPRET=1 with a seed;
tests/gpu/test_kernels_gpu.py imports it.
"""

import sys
import warnings

import torch

from megatron_taco.compressors import BlockInteger
from tests.unit.interpreted_kernels import bits, hard_data, room, unaligned

KEY = 0xFEDCBA9876543210
ARMS = (
    (BlockInteger(4, 128, 32, "bf16", "stochastic", KEY), torch.float32),
    (BlockInteger(4, 2048, 1, "fp32", "nearest"), torch.bfloat16),
    (BlockInteger(8, 512, 1, "fp32", "stochastic", KEY), torch.float32),
    (BlockInteger(8, 64, 64, "bf16", "nearest"), torch.float16),
)
"""SDP4Bit's gradients, weights and hop inside a node; and one more."""


def check(code: BlockInteger, dtype: torch.dtype, numel: int, device: str) -> list[str]:
    """Return what differs between kernels on ``device`` and torch on the CPU, by name."""
    torch_only = code.reference()
    x = hard_data(3, numel, code.block, dtype)
    payloads = torch_only.encode_rows(x)
    there = payloads.to(device)
    odd = unaligned(there, 1, 2)
    out = room(1, 3, payloads.shape[1], dtype=torch.uint8, device=device)
    rounded = room(0, numel, dtype=dtype, device=device)
    total = torch_only.decode_sum(payloads, numel)
    pairs = {
        "encode": (payloads, code.encode_rows(x.to(device))),
        "encode, odd address": (payloads, code.encode_rows(x.to(device), out)),
        "decode": (
            torch_only.decode_rows(payloads, numel, dtype),
            code.decode_rows(odd, numel, dtype),
        ),
        "decode_sum": (total, code.decode_sum(there, numel)),
        "decode_sum, rounded": (total.to(dtype), code.decode_sum(odd, numel, rounded)),
        "reduce_encode": (
            torch_only.reduce_encode(payloads, numel),
            code.reduce_encode(odd, numel),
        ),
    }
    return [name for name, (a, b) in pairs.items() if not torch.equal(bits(a), bits(b.cpu()))]


def main() -> int:
    """Check all arms; 1 if something differs."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # NumPy's, about infinities
    seed = int(sys.argv[1])
    failures = 0
    for code, dtype in ARMS:
        torch.manual_seed(seed)
        wrong = check(code, dtype, code.block + 7, "cpu")
        failures += bool(wrong)
        print(f"{code} {dtype} seed {seed}: {', '.join(wrong) or 'nothing'} differs")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
