"""Sums of payloads: of values, in rank order, and in the rotated domain."""

import pytest
import torch

from megatron_taco.compressors import Taco
from tests.unit.test_compressors_error import gaussian, relative_error
from tests.unit.test_compressors_hadamard import sylvester

FORMATS = ("e4m3", "e5m2", "int8", "int6", "int4")
SCALES = ("dual", "merged_fp32", "merged_bf16")
ARMS = [(form, scales) for form in FORMATS for scales in SCALES]
N = 1 << 16


def rows(world_size: int, numel: int = N, seed: int = 0) -> torch.Tensor:
    """Return independent standard normal FP32 [P, numel]."""
    return gaussian(world_size * numel, seed).view(world_size, numel)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_two_shot_all_reduce_has_the_error_of_the_design(world_size, scales):
    xs = rows(world_size)
    exact = xs.double().sum(0)
    for form, once, twice in (("e4m3", 0.026, 0.037), ("int8", 0.00694, 0.0098)):
        taco = Taco(form, scales=scales)
        payloads = taco.encode_rows(xs)
        assert relative_error(taco.decode_sum(payloads, N), exact) == pytest.approx(once, rel=0.02)
        reduced = taco.reduce_encode(payloads, N)
        error = relative_error(taco.decode(reduced, (N,), torch.float32), exact)
        assert error == pytest.approx(twice, rel=0.02)


@pytest.mark.parametrize(("form", "scales"), ARMS)
def test_decode_sum_is_the_sum_of_decoded_values(form, scales):
    taco = Taco(form, 64, scales=scales)
    xs = rows(4, 1000) * torch.tensor([1.0, 1e-3, 30.0, 1e3]).unsqueeze(1)
    payloads = taco.encode_rows(xs)
    decoded = taco.decode_rows(payloads, 1000, torch.float32)
    total = taco.decode_sum(payloads, 1000)
    assert total.dtype == torch.float32
    assert total.shape == (1000,)
    assert relative_error(total, decoded.double().sum(0)) < 1e-6
    one = taco.decode_sum(payloads[:1], 1000)
    assert relative_error(one, decoded[0]) < 1e-6


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("form", ["e4m3", "int8", "int6"])
def test_the_rotated_sum_gives_the_codes_of_inverse_sum_forward(form, scales, world_size):
    """Codes differ only on the edge between two, which FP32 rounding may cross: 1e-4 at most.

    Ties, exact but for the rounding of the scale, do not count among these. They occur where two
    ranks' codes stand in the same ratio as those of the block's peak, and in most sums of BF16
    scales, which have few bits.
    """
    taco = Taco(form, scales=scales)
    payloads = taco.encode_rows(rows(world_size, seed=world_size))
    reduced = taco.reduce_encode(payloads, N)
    decoded = taco.decode_rows(payloads, N, torch.float32)
    via_time = taco.encode(decoded.sum(0))
    limit = taco._code.limit

    def read(payloads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return FP64 code values [256, R, g] and merged scales [R, g]."""
        q = taco._code.unpack(taco._layout.read_codes(payloads, N)).double()
        s, *alpha = (scale.double() for scale in taco._layout.read_scales(payloads, N))
        return q.view(256, *s.shape), s / alpha[0] if alpha else s

    q, c = read(payloads)
    exact_sum = (q * c).sum(1)
    in_time = decoded.double().sum(0).view(-1, 256) @ sylvester(256) / 16
    assert relative_error(in_time.t(), exact_sum) < 1e-6
    (ours, our_scale), (theirs, their_scale) = read(reduced[None]), read(via_time[None])
    # FP32 scales have 17 bits, BF16 scales 8, and may be rounded either way.
    assert torch.allclose(our_scale, their_scale, rtol=2.0**-7 if "bf16" in scales else 2.0**-16)
    same_scale = (our_scale / their_scale - 1).abs() < 1e-6
    assert same_scale.float().mean() > (0.97 if taco._code.offset else 0.98)
    exact, ours, theirs = ((x * same_scale).view(-1) for x in (exact_sum / our_scale, ours, theirs))
    assert relative_error(ours, exact) == pytest.approx(relative_error(theirs, exact), rel=1e-4)
    differ = ours != theirs
    edge = (ours + theirs)[differ] / 2
    off_edge = (exact[differ] - edge).abs()
    assert (off_edge < 2e-6 * limit).all()
    assert (off_edge > 2.0**-22 * edge.abs()).sum() <= 1e-4 * N
    assert differ.sum() <= 1e-3 * N


@pytest.mark.parametrize("scales", SCALES)
def test_ranks_of_different_magnitude_are_summed_by_value(scales):
    """Summing codes and averaging scales gives 59% here; decoding first, 2.6% of the sum."""
    xs = rows(2, seed=3) * torch.tensor([1.0, 1e3]).unsqueeze(1)
    taco = Taco(scales=scales)
    payloads = taco.encode_rows(xs)
    exact = xs.double().sum(0)
    for order in (payloads, payloads.flip(0)):
        assert relative_error(taco.decode_sum(order, N), exact) == pytest.approx(0.026, rel=0.02)
    reduced = taco.decode(taco.reduce_encode(payloads, N), (N,), torch.float32)
    assert relative_error(reduced, exact) < 0.038  # 0.026: the larger rank's codes come again
    tens = rows(2, seed=4) * torch.tensor([1.0, 10.0]).unsqueeze(1)
    found = taco.decode_sum(taco.encode_rows(tens), N)
    assert relative_error(found, tens.double().sum(0)) == pytest.approx(0.026, rel=0.02)


@pytest.mark.parametrize(("form", "scales"), ARMS)
@pytest.mark.parametrize("ratio", [1e30, 1e-30, 1e60])
def test_scales_that_are_far_apart_neither_overflow_nor_hide_the_larger(form, scales, ratio):
    taco = Taco(form, 64, scales=scales)
    small, large = (1e-30, 1e30) if ratio == 1e60 else (1.0, ratio)
    xs = rows(3, 640, seed=5) * torch.tensor([small, large, small]).unsqueeze(1)
    exact = xs.double().sum(0)
    payloads = taco.encode_rows(xs)
    bound = {"e4m3": 0.03, "e5m2": 0.06, "int8": 0.01, "int6": 0.03, "int4": 0.13}[form]
    assert relative_error(taco.decode_sum(payloads, 640), exact) < bound
    reduced = taco.decode(taco.reduce_encode(payloads, 640), (640,), torch.float32)
    assert relative_error(reduced, exact) < 1.6 * bound


@pytest.mark.parametrize(("form", "scales"), ARMS)
def test_a_zero_rank_changes_nothing(form, scales):
    taco = Taco(form, 64, scales=scales)
    for sigma in (1e-30, 1.0, 1e30):
        x = rows(1, 200, seed=6) * sigma
        alone = taco.encode_rows(x)
        both = taco.encode_rows(torch.cat([torch.zeros_like(x), x, torch.zeros_like(x)]))
        assert torch.equal(taco.decode_sum(both, 200), taco.decode_sum(alone, 200))
        assert torch.equal(taco.reduce_encode(both, 200), taco.reduce_encode(alone, 200))


@pytest.mark.parametrize(("form", "scales"), ARMS)
def test_opposite_ranks_cancel_to_exact_zero(form, scales):
    taco = Taco(form, 64, scales=scales)
    x = rows(1, 200, seed=7)
    payloads = taco.encode_rows(torch.cat([x, -x]))
    total = taco.decode_sum(payloads, 200)
    assert (total == 0).all()
    reduced = taco.reduce_encode(payloads, 200)
    assert (taco.decode(reduced, (200,), torch.float32) == 0).all()


def test_the_sum_is_taken_in_rank_order():
    taco = Taco("int8", 32, "none", "merged_fp32")
    big = torch.full((32,), 127.0 * 2**26)
    ones = torch.full((32,), 127.0)
    payloads = taco.encode_rows(torch.stack([big, ones, -big]))
    assert (taco.decode_sum(payloads, 32) == 0).all()
    payloads = taco.encode_rows(torch.stack([big, -big, ones]))
    assert (taco.decode_sum(payloads, 32) == 127).all()


def test_no_elements_need_no_bytes():
    for clips in (False, True):
        taco = Taco(published_clips=clips)
        payloads = taco.encode_rows(torch.empty(3, 0))
        assert payloads.shape == (3, 0)
        assert taco.decode_rows(payloads, 0, torch.bfloat16).shape == (3, 0)
        assert taco.decode_sum(payloads, 0).shape == (0,)
        assert taco.reduce_encode(payloads, 0).shape == (0,)
        assert int(taco.nonfinite_blocks(payloads, 0)) == 0
