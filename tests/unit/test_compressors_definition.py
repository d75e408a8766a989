"""TACO's bytes and values against a second, plain NumPy reading of its definition.

The oracle goes block by block and knows nothing of columns, layouts or torch's casts.
"""

from math import sqrt

import numpy as np
import pytest
import torch

from megatron_taco.compressors import Taco
from megatron_taco.compressors.scales import round_scale as round_scale_of_torch
from megatron_taco.compressors.scales import square_root

F = np.float32
OFFSETS = {"int4": F(24), "int6": F(96)}  # of codes while they are summed
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
    """Return the transform of FP32 [B] by butterflies, not normalised."""
    x = x.copy()
    h = 1
    while h < len(x):
        for start in range(0, len(x), 2 * h):
            for i in range(start, start + h):
                x[i], x[i + h] = x[i] + x[i + h], x[i] - x[i + h]
        h *= 2
    return x


def norm(block: int, rotate: bool) -> F:
    """Return what the transform is yet to be multiplied by."""
    return F(1 / sqrt(block)) if rotate else F(1)


def mean_square(x: np.ndarray) -> F:
    """Return the mean of squares of FP32 [B]: four neighbours in order, then pairwise."""
    a, b, c, d = (x * x).reshape(-1, 4).T
    total = list(((a + b) + c) + d)
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


def round_scale(x: F) -> F:
    """Round a positive number to 17 significant bits, halves up."""
    mantissa, exponent = np.frexp(np.float64(x))
    return F(np.floor(mantissa * 2**17 + 0.5) * 2.0 ** (int(exponent) - 17))


def relative(wire: list[F], e: int) -> F:
    """Return a block's merged scale times 2^-e, as decoding takes it."""
    if len(wire) == 2:
        return round_scale(wire[0] / (wire[1] * F(2.0**e)))
    return round_scale(wire[0] * F(2.0**-e))


def scale_exponent(wire: list[F]) -> int:
    """Return floor(log2) of a merged scale, or the difference of those of dual scales."""
    exponents = [int(np.frexp(w)[1]) - 1 if w else -127 for w in wire]
    return exponents[0] - sum(exponents[1:])


def encode_block(taco: Taco, z: np.ndarray, e: int, rotate: bool) -> tuple[list[int], list[F]]:
    """Return the codes and wire scales of z * 2^e, z FP32 [B]."""
    limit = F(LIMITS[taco.format])
    y = hadamard(z) if rotate else z
    ratio = (1 / sqrt(len(z)) if rotate else 1) / LIMITS[taco.format]
    s = round_scale(np.abs(y).max() * F(ratio))
    if taco.scales == "dual":
        v = mean_square(z)
        alpha = min(limit / np.sqrt(v), F(2**21)) if v else F(1)
        wire = [s * alpha, alpha * F(2.0**-e) if s else F(1)]
        divisor = s
    else:
        wire = [s * F(2.0**e)]
        if taco.scales == "merged_bf16":
            wire[0] = bf16(wire[0])
        divisor = wire[0] * F(2.0**-e)
    if not divisor:
        return [0] * len(y), wire
    inverse = norm(len(z), rotate) / divisor
    if taco.format in TABLES:
        return [to_code(taco.format, value * inverse) for value in y], wire
    return [to_code(taco.format, np.float64(value) * np.float64(inverse)) for value in y], wire


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


def test_a_scale_has_17_bits_and_the_sign_of_a_nan_does_not_matter():
    """Vectorised maxima of torch give the NaN of all ones, which is -1 as an integer."""
    bits = torch.tensor([-1, 0x7FFFFFFF, -0x400000, 0x7FC00000], dtype=torch.int32)
    assert round_scale_of_torch(bits.view(torch.float32)).isnan().all()
    x = torch.tensor([1 + 2.0**-17, 1 + 2.0**-17 - 2.0**-23, 0.0, float("inf")])
    assert round_scale_of_torch(x).tolist() == [1 + 2.0**-16, 1.0, 0.0, float("inf")]


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
        e = max(-100, min(126, scale_exponent(wire) + int(np.log2(LIMITS[form]))))
        e = e if e < -60 else 0
        rotate = rotation == "hadamard"
        y = hadamard(q) if rotate else q
        expected.append(y * (relative(wire, e) * norm(block, rotate)) * F(2.0**e))
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
        ratios = [relative(wire, e) for _, wire in parts]
        terms = [np.array([from_code(form, code) for code in codes], F) for codes, _ in parts]
        start = F(-0.0)
        if form in OFFSETS:
            terms = [term + OFFSETS[form] for term in terms]
            start = -OFFSETS[form] * (ratios[0] + ratios[1] + ratios[2])
        total = start + terms[0] * ratios[0] + terms[1] * ratios[1] + terms[2] * ratios[2]
        blocks.append(encode_block(taco, total, e, rotate=False))
    payloads = taco.encode_rows(xs)
    reduced = taco.reduce_encode(payloads, xs.shape[1])
    assert bytes(reduced.tolist()) == assemble(taco, blocks)
