"""How much a threshold lets through, and bitmaps."""

import pytest
import torch

from megatron_taco.gradients.homomorphic import pack_bits, unpack_bits
from megatron_taco.gradients.sidco import threshold
from megatron_taco.gradients.tagc import table_threshold


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def share_above(values: torch.Tensor, eta: torch.Tensor) -> float:
    return float((values > eta).double().mean())


@pytest.mark.parametrize("share", [0.3, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_fit_is_exact_for_exponential_magnitudes(share, scale):
    values = torch.empty(400_000).exponential_(generator=generator(1)) * scale
    assert share_above(values, threshold(values, share)) == pytest.approx(share, rel=0.12)


def test_stages_bring_other_distributions_near():
    """Of a Gaussian one stage lets 1/40 of what was asked through, of t_3 half as much again."""
    gaussian = torch.randn(400_000, generator=generator(2)).abs()
    heavy = gaussian / (torch.randn(3, 400_000, generator=generator(3)).square().mean(0).sqrt())
    for values in (gaussian, heavy):
        for share in (0.01, 0.001):
            one = share_above(values, threshold(values, share, stages=1)) / share
            two = share_above(values, threshold(values, share)) / share
            assert abs(two - 1) < abs(one - 1)
            if share == 0.01:
                assert 0.6 < two < 1.25


def test_what_is_not_finite_does_not_move_the_threshold():
    values = torch.randn(1000, generator=generator(4)).abs()
    spoilt = torch.cat([values, torch.tensor([torch.nan, torch.inf])])
    assert threshold(spoilt, 0.1) == pytest.approx(float(threshold(values, 0.1)))
    assert table_threshold(spoilt, 0.1).isfinite()
    assert threshold(torch.zeros(5), 0.1) == 0


@pytest.mark.parametrize("ratio", [0.5, 0.05, 0.002])
def test_the_table_lets_no_more_through_and_no_smaller_entry_would_do(ratio):
    values = torch.randn(20_000, generator=generator(5)).abs()
    found = table_threshold(values, ratio)
    assert share_above(values, found) <= ratio
    assert share_above(values, found * 2 ** (-1 / 8) * 0.9999) > ratio


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
def test_bitmaps_come_back(numel):
    mask = torch.rand(numel, generator=generator(numel)) < 0.3
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-numel // 8)
    assert torch.equal(unpack_bits(packed, numel), mask)


def test_bit_i_of_byte_b_is_element_8b_plus_i():
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[1, 8]] = True
    assert pack_bits(mask).tolist() == [2, 1]
