"""TACO's bytes and values against a second, plain NumPy reading of its definition.

The oracle goes block by block and knows nothing of columns, layouts or torch's casts.
"""

from math import sqrt

import numpy as np
import pytest
import torch

from megatron_taco.compressors import Taco
from megatron_taco.compressors.scales import square_root

F = np.float32
LIMITS = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int6": 31.0, "int4": 7.0}
SCALES = ("dual", "merged_fp32", "merged_bf16")


def fp8_table(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Return the values of the codes 0, 1, 2 .. up to that of the largest finite one."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        if value <= largest:
            values.append(value)
    return np.array(values)


TABLES = {"e4m3": fp8_table(4, 3, 448.0), "e5m2": fp8_table(5, 2, 57344.0)}


def to_code(form: str, value: F) -> int:
    """Return the code of one value: nearest, ties to the even code, saturating."""
    if form not in TABLES:
        return int(max(-LIMITS[form], min(LIMITS[form], round(float(value)))))
    table = TABLES[form]
    magnitude = min(abs(float(value)), float(table[-1]))
    above = int(np.searchsorted(table, magnitude))
    below = max(above - 1, 0)
    to_below, to_above = magnitude - table[below], table[above] - magnitude
    pick = above
    if to_below < to_above or (to_below == to_above and below % 2 == 0):
        pick = below
    return pick | (0x80 if np.signbit(value) else 0)


def from_code(form: str, code: int) -> F:
    """Return the value of one code of ``to_code``."""
    if form not in TABLES:
        return F(code)
    value = F(TABLES[form][code & 0x7F])
    return -value if code & 0x80 else value


def pack(form: str, codes: list[int]) -> bytes:
    """Return the bytes of one block's codes: a little-endian bit stream."""
    bits = {"int6": 6, "int4": 4}.get(form, 8)
    stream = sum((code & (2**bits - 1)) << (bits * i) for i, code in enumerate(codes))
    return stream.to_bytes(len(codes) * bits // 8, "little")


def hadamard(x: np.ndarray) -> np.ndarray:
    """Return the orthonormal transform of FP32 [B] by butterflies in place."""
    x = x.copy()
    h = 1
    while h < len(x):
        for start in range(0, len(x), 2 * h):
            for i in range(start, start + h):
                x[i], x[i + h] = x[i] + x[i + h], x[i] - x[i + h]
        h *= 2
    return x * F(1 / sqrt(len(x)))


def mean_square(x: np.ndarray) -> F:
    """Return the mean of squares of FP32 [B], summed pairwise."""
    total = list(x * x)
    while len(total) > 1:
        total = [total[i] + total[i + 1] for i in range(0, len(total), 2)]
    return total[0] / F(len(x))


def bf16(x: F) -> F:
    """Round to BF16, nearest even."""
    bits = int(np.array(x, F).view(np.uint32))
    return np.array((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000, np.uint32).view(F)[()]


def floor_exponent(x: F) -> int:
    """Return floor(log2 x), limited as block exponents are."""
    return max(-100, min(126, int(np.frexp(x)[1]) - 1)) if x else -100


def scale_exponent(wire: list[F]) -> int:
    """Return floor(log2) of a merged scale, or the difference of those of dual scales."""
    exponents = [int(np.frexp(w)[1]) - 1 if w else -127 for w in wire]
    return exponents[0] - sum(exponents[1:])


def encode_block(taco: Taco, z: np.ndarray, e: int, rotate: bool) -> tuple[list[int], list[F]]:
    """Return the codes and wire scales of z * 2^e, z FP32 [B]."""
    limit = F(LIMITS[taco.format])
    if taco.scales == "dual":
        target = F(448.0) if taco.format == "e4m3" else limit
        v = mean_square(z)
        alpha = min(target / np.sqrt(v), F(2**20)) if v else F(2**20)
        z = z * alpha
    y = hadamard(z) if rotate else z
    s = np.abs(y).max() / limit
    wire = [s, alpha * F(2.0**-e)] if taco.scales == "dual" else [s * F(2.0**e)]
    if taco.scales == "merged_bf16":
        wire[0] = bf16(wire[0])
    divisor = s if taco.scales == "dual" else wire[0] * F(2.0**-e)
    codes = [to_code(taco.format, value / divisor) if divisor else 0 for value in y]
    return codes, wire


def assemble(taco: Taco, blocks: list[tuple[list[int], list[F]]]) -> bytes:
    """Return the payload of encoded blocks."""
    out = b"".join(pack(taco.format, codes) for codes, _ in blocks)
    for kind in range(len(blocks[0][1])):
        for _, wire in blocks:
            raw = np.array(wire[kind], F).tobytes()
            out += raw[2:] if taco.scales == "merged_bf16" else raw
    return out


def encode(taco: Taco, x: np.ndarray) -> list[tuple[list[int], list[F]]]:
    """Encode FP32 [n] block by block."""
    blocks = []
    for start in range(0, len(x), taco.block):
        block = np.zeros(taco.block, F)
        part = x[start : start + taco.block]
        block[: len(part)] = part
        e = floor_exponent(np.abs(block).max())
        blocks.append(encode_block(taco, block * F(2.0**-e), e, taco.rotation == "hadamard"))
    return blocks


def sample(seed: int, numel: int) -> torch.Tensor:
    """Return values whose magnitude varies a lot from one run of 100 to the next."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    scale = torch.randn(numel // 100 + 1, generator=generator).mul(20).exp2()
    return x * scale.repeat_interleave(100)[:numel]


def test_the_square_root_is_correctly_rounded_whatever_the_length():
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, x * 2.0**-80, x * 2.0**80])
    expected = torch.from_numpy(np.sqrt(x.numpy()))
    assert torch.equal(square_root(x), expected)
    assert torch.equal(square_root(x[:3]), expected[:3])


ARMS = [
    pytest.param(form, block, rotation, scales, id=f"{form}-{block}-{rotation}-{scales}")
    for form in LIMITS
    for block, rotation in ((32, "hadamard"), (64, "none"), (256, "hadamard"))
    for scales in SCALES
]


@pytest.mark.parametrize(("form", "block", "rotation", "scales"), ARMS)
def test_bytes_are_those_of_the_definition(form, block, rotation, scales):
    taco = Taco(form, block, rotation, scales)
    x = sample(3, 5 * block + 17)
    x[block : 2 * block] = 0.0
    expected = assemble(taco, encode(taco, x.numpy()))
    assert bytes(taco.encode(x).tolist()) == expected


@pytest.mark.parametrize(("form", "block", "rotation", "scales"), ARMS)
def test_decoding_is_that_of_the_definition(form, block, rotation, scales):
    taco = Taco(form, block, rotation, scales)
    x = sample(4, 3 * block)
    expected = []
    for codes, wire in encode(taco, x.numpy()):
        q = np.array([from_code(form, code) for code in codes], F)
        shift = 0
        if scales != "dual":
            largest = int(np.log2(LIMITS[form]))
            shift = max(-100, min(126, int(np.frexp(wire[0])[1]) - 1 + largest))
        y = q * (wire[0] * F(2.0**-shift))
        y = hadamard(y) if rotation == "hadamard" else y
        expected.append(y / wire[1] if scales == "dual" else y * F(2.0**shift))
    decoded = taco.decode(taco.encode(x), x.shape, torch.float32)
    assert torch.equal(decoded, torch.from_numpy(np.concatenate(expected)))


@pytest.mark.parametrize(("form", "block", "rotation", "scales"), ARMS)
def test_reduction_is_that_of_the_definition(form, block, rotation, scales):
    taco = Taco(form, block, rotation, scales)
    xs = torch.stack([sample(5 + rank, 2 * block + 1) for rank in range(3)])
    ranks = [encode(taco, x.numpy()) for x in xs]
    blocks = []
    for parts in zip(*ranks, strict=True):
        exponents = [scale_exponent(wire) for _, wire in parts]
        e = max(-100, min(126, max(exponents) + int(np.log2(LIMITS[form]))))
        total = None
        for codes, wire in parts:
            ratio = wire[0] * F(2.0**-e)
            if scales == "dual":
                ratio = wire[0] / (wire[1] * F(2.0**e))
            term = np.array([from_code(form, code) for code in codes], F) * ratio
            total = term if total is None else total + term
        blocks.append(encode_block(taco, total, e, rotate=False))
    payloads = taco.encode_rows(xs)
    reduced = taco.reduce_encode(payloads, xs.shape[1])
    assert bytes(reduced.tolist()) == assemble(taco, blocks)
