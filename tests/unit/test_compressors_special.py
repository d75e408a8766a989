"""Zeros, NaN, infinities, outliers and the ends of the number range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.compressors import Taco

FORMATS = ("e4m3", "e5m2", "int8", "int6", "int4")
SCALES = ("dual", "merged_fp32", "merged_bf16")
ROTATIONS = ("hadamard", "none")
ARMS = [
    pytest.param(Taco(form, 32, rotation, scales), id=f"{form}-{rotation}-{scales}")
    for form in FORMATS
    for rotation in ROTATIONS
    for scales in SCALES
]
B = 32
LARGEST = torch.finfo(torch.float32).max


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal FP32 [numel]."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def positive_zero(x: torch.Tensor) -> bool:
    """Tell whether all of ``x`` is +0."""
    return bool((x == 0).all()) and not bool(x.signbit().any())


@pytest.mark.parametrize("taco", ARMS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_blocks_are_zero_bytes_and_exact(taco, zero):
    x = noise(4 * B)
    x[B : 2 * B] = zero
    payload = taco.encode(x)
    decoded = taco.decode(payload, x.shape, torch.float32)
    assert positive_zero(decoded[B : 2 * B])
    alone = taco.encode(x[B : 2 * B])
    first_scale = B * taco._code.bits // 8 + (2 if taco.scales == "merged_bf16" else 4)
    assert not alone[:first_scale].any()
    both = torch.stack([payload, payload])
    assert positive_zero(taco.decode_sum(both, 4 * B)[B : 2 * B])
    reduced = taco.decode(taco.reduce_encode(both, 4 * B), x.shape, torch.float32)
    assert positive_zero(reduced[B : 2 * B])
    assert (reduced[:B] != 0).any()


@pytest.mark.parametrize("taco", ARMS)
def test_signed_zeros_within_a_block_decode_to_zero_without_rotation(taco):
    x = noise(B)
    x[3], x[4] = 0.0, -0.0
    decoded = taco.decode(taco.encode(x), x.shape, torch.float32)
    if taco.rotation == "none":
        assert (decoded[3:5] == 0).all()
    other = x.clone()
    other[3], other[4] = -0.0, 0.0
    assert torch.equal(taco.decode(taco.encode(other), x.shape, torch.float32), decoded)


@pytest.mark.parametrize("taco", ARMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nonfinite_value_makes_its_block_nan_and_no_other(taco, bad, dtype):
    clean = noise(5 * B + 3).to(dtype)
    before = taco.encode(clean)
    for at in (0, 2 * B + 7, 5 * B + 2):
        x = clean.clone()
        x[at] = bad
        payload = taco.encode(x)
        block = slice(at // B * B, at // B * B + B)
        others = torch.ones(len(x), dtype=torch.bool)
        others[block] = False
        decoded = taco.decode(payload, x.shape, dtype)
        assert decoded[block].isnan().all()
        expected = taco.decode(before, x.shape, dtype)
        assert torch.equal(decoded[others], expected[others])
        codes = payload[: (5 + 1) * B * taco._code.bits // 8].view(6, -1)
        assert not codes[at // B].any()
        both = torch.stack([before, payload])
        counts = [taco.nonfinite_blocks(p, len(x)) for p in (before.unsqueeze(0), both)]
        assert [int(c) for c in counts] == [0, 1]
        assert counts[0].dtype == torch.int64
        assert counts[0].dim() == 0
        for order in (both, both.flip(0)):
            total = taco.decode_sum(order, len(x))
            assert total[block].isnan().all()
            assert total[others].isfinite().all()
            reduced = taco.reduce_encode(order, len(x))
            again = taco.decode(reduced, x.shape, torch.float32)
            assert again[block].isnan().all()
            assert again[others].isfinite().all()
            assert int(taco.nonfinite_blocks(reduced.unsqueeze(0), len(x))) == 1


def test_infinities_of_both_signs_are_no_less_nan():
    x = noise(B)
    x[0], x[1] = float("inf"), -float("inf")
    for taco in (param.values[0] for param in ARMS):
        assert taco.decode(taco.encode(x), x.shape, torch.float32).isnan().all()


@pytest.mark.parametrize("taco", ARMS)
@pytest.mark.parametrize("outlier", [1e30, -1e30, 1e-30])
def test_a_blocks_error_depends_on_that_block_alone(taco, outlier):
    clean = noise(4 * B)
    spoilt = clean.clone()
    spoilt[B + 5] = outlier
    spoilt[2 * B : 3 * B] *= 1e20
    a = taco.decode(taco.encode(clean), clean.shape, torch.float32)
    b = taco.decode(taco.encode(spoilt), clean.shape, torch.float32)
    assert torch.equal(a[:B], b[:B])
    assert torch.equal(a[3 * B :], b[3 * B :])
    peak = spoilt[B : 2 * B].abs().max()
    assert b.isfinite().all()
    assert (b[B : 2 * B].abs().max() - peak).abs() < 0.5 * peak


@pytest.mark.parametrize("taco", ARMS)
def test_values_at_a_sixteenth_of_the_range_come_back_finite(taco):
    generator = torch.Generator().manual_seed(5)
    signs = torch.randint(0, 2, (64 * B,), generator=generator) * 2.0 - 1
    signs[:B], signs[B : 2 * B] = 1.0, -1.0
    x = signs * (LARGEST / 16)
    bound = {"e4m3": 0.05, "e5m2": 0.1, "int8": 0.02, "int6": 0.05, "int4": 0.25}[taco.format]
    for y in (x, x.bfloat16()):
        decoded = taco.decode(taco.encode(y), y.shape, y.dtype).double()
        assert decoded.isfinite().all()
        assert (decoded - y.double()).norm() < bound * y.double().norm()
    total = taco.decode_sum(taco.encode_rows(torch.stack([x, x, x])), x.numel()).double()
    assert (total - 3 * x.double()).norm() < bound * 3 * x.double().norm()


@pytest.mark.parametrize("taco", ARMS)
def test_finite_values_give_finite_values(taco):
    @settings(max_examples=25, deadline=None, database=None)
    @given(
        st.lists(
            st.floats(-LARGEST / 16, LARGEST / 16, width=32, allow_subnormal=True), max_size=3 * B
        ),
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def law(values: list[float], dtype: torch.dtype) -> None:
        x = torch.tensor(values, dtype=torch.float32).to(dtype)
        payload = taco.encode(x)
        assert taco.decode(payload, x.shape, dtype).isfinite().all()
        both = torch.stack([payload, payload])
        reduced = taco.reduce_encode(both, x.numel())
        assert taco.decode(reduced, x.shape, torch.float32).isfinite().all()
        assert int(taco.nonfinite_blocks(both, x.numel())) == 0

    law()


@pytest.mark.parametrize("taco", ARMS)
def test_subnormal_values_are_kept_to_the_smallest_step_or_vanish(taco):
    smallest = 2.0**-149
    x = torch.tensor([smallest, -3 * smallest, 2.0**-127, 2.0**-126, 0.0])
    for block in (x[:1], x[:2], x):
        decoded = taco.decode(taco.encode(block), block.shape, torch.float32)
        assert decoded.isfinite().all()
        assert (decoded - block).abs().max() <= block.abs().max()
    dual = Taco("int8", 32)
    decoded = dual.decode(dual.encode(x), x.shape, torch.float32)
    assert (decoded - x).abs().max() <= 0.02 * 2.0**-126


def test_a_value_beyond_fp16_becomes_infinite_by_a_plain_cast():
    x = torch.full((B,), 1e6)
    taco = Taco(block=B)
    assert taco.decode(taco.encode(x), x.shape, torch.float16).isinf().all()
