"""The kernels against plain torch: by Triton's interpreter on the CPU, or on a GPU.

test_kernels.py runs this file under TRITON_INTERPRET=1 with a seed and a share, "k/n": the arms
k, k + n, k + 2n ... are checked. tests/gpu/test_kernels_gpu.py imports it.
"""

import itertools
import math
import sys
import warnings
from functools import partial

import torch

from megatron_taco.compressors import BlockInteger, Taco
from megatron_taco.compressors.scaled import SCALES, ScaledBlocks
from megatron_taco.compressors.taco import BLOCKS, ROTATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHIFTS = (7, 0, -6)
"""Added to whole blocks, so that rows lie at any address and at even ones."""
KEY = 0x9234_5678_FEDC_BA98
INTEGERS = (
    BlockInteger(4, 128, 32, "bf16", "stochastic", KEY),  # SDP4Bit's gradients
    BlockInteger(4, 128, 32, "bf16"),
    BlockInteger(8, 512, 1, "fp32"),
    BlockInteger(6, 1024, 64, "bf16", "stochastic", KEY + 1),
    BlockInteger(4, 2048, 1, "fp32"),  # SDP4Bit's differences of weights
    BlockInteger(4, 32, 32, "fp32", "stochastic", 1),
    BlockInteger(6, 4096, 512, "fp32"),
    BlockInteger(8, 2048, 256, "bf16", "stochastic", 0),
)


def arms(blocks: int) -> list[tuple[ScaledBlocks, torch.dtype, int]]:
    """Every format and scale with every dtype, and integers of blocks not transformed as a whole.

    Blocks, rotations and odd sizes take turns. TACO as it comes and SDP4Bit's gradients as a
    trainer has them, in whole blocks, are the first and the seventh.

    Each is a compressor, a dtype and a number of elements, of about ``blocks`` blocks.
    """
    found: list[tuple[ScaledBlocks, torch.dtype, int]] = []
    pairs = itertools.product(("e4m3", "e5m2", "int8", "int6", "int4"), SCALES, DTYPES)
    for k, (form, scales, dtype) in enumerate(pairs):
        block = BLOCKS[k % len(BLOCKS)]
        rotation = ROTATIONS[k // 2 % 2]
        numel = blocks * block + SHIFTS[k // len(BLOCKS) % 3]
        found.append((Taco(form, block, rotation, scales), dtype, numel))
    for k, code in enumerate(INTEGERS):
        numel = max(blocks * 256 // code.block, 2) * code.block + SHIFTS[k % 3]
        found.append((code, DTYPES[k % 3 - 1], numel))
    found.insert(0, (Taco(), torch.bfloat16, max(blocks, 4) * 256))
    found.insert(6, (INTEGERS[0], torch.float32, max(blocks, 4) * 256))
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
    memory = torch.zeros(shift + rows * (size + gap), dtype=torch.uint8, device=payloads.device)
    view = memory[shift:].view(rows, size + gap)[:, :size]
    view.copy_(payloads)
    return view


def addresses(payloads: list[torch.Tensor], device: str) -> torch.Tensor:
    """Return the table of where payloads lie that have memory of their own, as peers' have."""
    found = [payload.data_ptr() for payload in payloads]
    assert not any(address % 16 for address in found)
    return torch.tensor(found, dtype=torch.int64, device=device)


def room(shift: int, *shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a contiguous tensor ``shift`` elements behind an aligned address, of rubbish."""
    memory = torch.full((shift + math.prod(shape),), 77, dtype=dtype, device=device)
    return memory[shift:].view(shape)


def check(taco: ScaledBlocks, dtype: torch.dtype, numel: int, device: str) -> list[str]:
    """Return what differs between kernels on ``device`` and torch on the CPU, by name."""
    torch_only = taco.reference()
    x = hard_data(3, numel, taco.block, dtype)
    wide = torch.zeros(3, numel + 5, dtype=dtype, device=device)
    wide[:, :numel] = x
    payloads = torch_only.encode_rows(x)
    size = payloads.shape[1]
    opposites = torch_only.encode_rows(torch.stack((x[1], -x[1])))
    values = torch_only.decode_rows(payloads, numel, dtype)
    total = torch_only.decode_sum(payloads, numel)
    reduced = torch_only.reduce_encode(payloads, numel)
    there = payloads.to(device)
    odd = unaligned(there, 1, 2)
    apart = [payload.clone() for payload in there]
    order = [0, 2, 1, 2, 0, 2, 2, 1, 2]
    many = payloads[order]
    shift = 1 if numel % 2 else 4
    bytes_ = partial(room, dtype=torch.uint8, device=device)
    into = partial(room, dtype=dtype, device=device)
    pairs = {
        "encode": (payloads, taco.encode_rows(x.to(device))),
        "encode, wide rows": (payloads, taco.encode_rows(wide[:, :numel])),
        "encode, odd address": (
            payloads,
            taco.encode_rows(x.to(device), bytes_(shift, 3, size)),
        ),
        "decode": (values, taco.decode_rows(there, numel, dtype)),
        "decode, odd address": (
            values,
            taco.decode_rows(odd, numel, dtype, into(shift, 3, numel)),
        ),
        "decode_sum": (total, taco.decode_sum(there, numel)),
        "decode_sum, rounded": (
            total.to(dtype),
            taco.decode_sum(there, numel, into(0, numel)),
        ),
        "decode_sum, odd address": (
            total.to(dtype),
            taco.decode_sum(odd, numel, into(shift, numel)),
        ),
        "decode_sum of peers": (
            total.to(dtype),
            taco.decode_sum_peers(addresses(apart, device), numel, into(shift, numel)),
        ),
        "decode_sum of nine peers": (
            torch_only.decode_sum(many, numel),
            taco.decode_sum_peers(
                addresses([apart[k] for k in order], device),
                numel,
                room(0, numel, dtype=torch.float32, device=device),
            ),
        ),
        "reduce_encode": (reduced, taco.reduce_encode(there, numel)),
        "reduce_encode, odd address": (
            reduced,
            taco.reduce_encode(odd, numel, bytes_(shift, size)),
        ),
        "reduce_encode of opposites": (
            torch_only.reduce_encode(opposites, numel),
            taco.reduce_encode(opposites.to(device), numel),
        ),
        "reduce_encode of nine": (
            torch_only.reduce_encode(many, numel),
            taco.reduce_encode(many.to(device), numel),
        ),
    }
    found = {name: difference(expected, result.cpu()) for name, (expected, result) in pairs.items()}
    return [f"{name} ({text})" for name, text in found.items() if text]


def difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Return how many elements differ in bits and the first of them, "" if none does."""
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    places = (bits(expected) != bits(found)).nonzero()
    if not len(places):
        return ""
    first = tuple(places[0].tolist())
    values = f"{found[first].item()!r} instead of {expected[first].item()!r}"
    return f"{len(places)} of {expected.numel()}, first at {list(first)}: {values}"


def check_float8() -> list[str]:
    """Compare the software FP8 conversions with torch's: every BF16 number, ties, neighbours."""
    from tests.unit.kernel_probes import convert_float8

    every = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    ulp = torch.tensor(1, dtype=torch.int32)
    near = [(every.view(torch.int32) + k * ulp).view(torch.float32) for k in (-1, 0, 1, 2)]
    wrong = []
    for dtype, mantissa, bias, limit in (
        (torch.float8_e4m3fn, 3, 7, 448.0),
        (torch.float8_e5m2, 2, 15, 57344.0),
    ):
        for x in near:
            x = torch.where(x.isfinite(), x, 1.0).clamp(-limit, limit)
            codes = torch.zeros(x.numel(), dtype=torch.uint8)
            back = torch.zeros(x.numel())
            convert_float8[(1,)](x, codes, back, x.numel(), mantissa, bias)
            expected = x.to(dtype)
            if not torch.equal(codes, expected.view(torch.uint8)):
                wrong.append(f"to {dtype}")
            if not torch.equal(bits(back), bits(expected.float())):
                wrong.append(f"from {dtype}")
    return wrong


def main() -> int:
    """Check a share of the arms; 1 if something differs."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # NumPy's, about infinities
    seed, (share, shares) = int(sys.argv[1]), map(int, sys.argv[2].split("/"))
    failures = 0
    chosen = arms(2)[share::shares]
    for k, (taco, dtype, numel) in enumerate(chosen):
        torch.manual_seed(seed + k)
        wrong = check(taco, dtype, numel, "cpu")
        failures += bool(wrong)
        if wrong:
            print(f"{taco} {dtype} numel {numel} seed {seed + k}: {'; '.join(wrong)}")
    print(f"{len(chosen)} arms checked, {failures} differ")
    if share == 0:
        wrong = check_float8()
        failures += bool(wrong)
        print(f"float8 conversions checked, {len(wrong)} differ: {', '.join(wrong)}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
