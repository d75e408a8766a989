"""The arm with the released code's clips: it does what that code does, faults included."""

import pytest
import torch

from megatron_taco.compressors import Taco
from tests.unit.test_compressors_error import gaussian, relative_error, round_trip
from tests.unit.test_compressors_hadamard import sylvester

PUBLISHED = Taco(published_clips=True)
N = 1 << 16


def sent_scales(x: torch.Tensor, taco: Taco = PUBLISHED) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and alpha [g] as they are sent for ``x``."""
    s, alpha = taco._layout.read_scales(taco.encode(x).unsqueeze(0), x.numel())
    return s[0], alpha[0]


@pytest.mark.parametrize("sigma", [1e-5, 1e-2, 1.0, 1e2])
@pytest.mark.parametrize(("form", "expected"), [("e4m3", 0.026), ("e5m2", 0.052)])
def test_ordinary_data_has_the_same_error_as_the_default(form, expected, sigma):
    x = gaussian(N) * sigma
    taco = Taco(form, published_clips=True)
    assert relative_error(round_trip(taco, x), x) == pytest.approx(expected, rel=0.02)


def test_scales_follow_the_published_formulae():
    x = gaussian(4 * 256, seed=1) * 3
    s, alpha = sent_scales(x)
    blocks = x.double().view(4, 256)
    expected = 448 / (blocks.square().mean(1) + 1e-6).sqrt()
    assert torch.allclose(alpha.double(), expected, rtol=1e-6)
    y = (blocks * expected.unsqueeze(1)) @ sylvester(256) / 16
    assert torch.allclose(s.double(), y.abs().amax(1) / 448, rtol=1e-5)


def test_the_adaptive_scale_is_a_constant_1000_below_an_rms_of_0448():
    assert (sent_scales(gaussian(N) * 0.01)[1] == 1000).all()
    assert (sent_scales(gaussian(N) * 1e-5)[1] == 1000).all()
    assert (sent_scales(gaussian(N))[1] < 1000).all()
    assert (sent_scales(gaussian(N) * 1e9)[1] == torch.tensor(1e-3)).all()


def test_a_partly_filled_block_takes_its_mean_over_what_it_has():
    x = torch.full((256 + 64,), 2.0)
    alpha = sent_scales(x)[1]
    assert alpha.tolist() == pytest.approx([224.0, 224.0], rel=1e-6)
    decoded = round_trip(PUBLISHED, x)
    assert relative_error(decoded, x) < 0.03


def test_e5m2_is_scaled_to_448_and_not_to_its_own_largest_value():
    x = gaussian(N)
    taco = Taco("e5m2", published_clips=True)
    codes = taco._code.unpack(taco._layout.read_codes(taco.encode(x).unsqueeze(0), N))
    assert codes.abs().max() == 448
    assert sent_scales(x, taco)[1].mean() == pytest.approx(1000)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_become_zero_and_are_not_counted(bad):
    x = gaussian(3 * 256)
    x[300] = bad
    payload = PUBLISHED.encode(x)
    decoded = PUBLISHED.decode(payload, x.shape, torch.float32)
    assert (decoded[256:512] == 0).all()
    assert relative_error(decoded[:256], x[:256]) < 0.03
    assert int(PUBLISHED.nonfinite_blocks(payload.unsqueeze(0), x.numel())) == 0
    default = Taco()
    marked = default.encode(x).unsqueeze(0)
    assert int(default.nonfinite_blocks(marked, x.numel())) == 1


def test_blocks_beyond_the_clips_are_lost_where_the_default_keeps_them():
    large, small = gaussian(N) * 1e13, gaussian(N) * 1e-20
    assert relative_error(round_trip(PUBLISHED, large), large) > 0.9
    assert relative_error(round_trip(PUBLISHED, small), small) > 0.9
    assert (sent_scales(large)[0] == 1e6).all()
    for x in (large, small):
        assert relative_error(round_trip(Taco(), x), x) == pytest.approx(0.026, rel=0.02)


def test_zero_blocks_stay_zero():
    x = torch.zeros(512)
    s, alpha = sent_scales(x)
    assert (s == torch.tensor(1e-12)).all()
    assert (alpha == 1000).all()
    assert (round_trip(PUBLISHED, x) == 0).all()


def test_the_middle_step_decodes_sums_and_encodes():
    xs = gaussian(4 * N, seed=2).view(4, N)
    payloads = PUBLISHED.encode_rows(xs)
    decoded = PUBLISHED.decode_rows(payloads, N, torch.float32)
    total = ((decoded[0] + decoded[1]) + decoded[2]) + decoded[3]
    assert torch.equal(PUBLISHED.decode_sum(payloads, N), total)
    reduced = PUBLISHED.reduce_encode(payloads, N)
    assert torch.equal(reduced, PUBLISHED.encode(total))
    exact = xs.double().sum(0)
    error = relative_error(PUBLISHED.decode(reduced, (N,), torch.float32), exact)
    assert error == pytest.approx(0.037, rel=0.02)
