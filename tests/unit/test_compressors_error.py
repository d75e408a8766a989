"""The error of one encoding: the figures of the design, over scales, data and formats."""

import pytest
import torch

from megatron_taco.compressors import Taco

SCALES = ("dual", "merged_fp32", "merged_bf16")
GAUSSIAN = [
    ("e4m3", 256, 0.026),
    ("e5m2", 256, 0.052),
    ("int8", 256, 0.00694),
    ("int6", 256, 0.0285),
    ("int4", 256, 0.126),
    ("int6", 64, 0.0243),
    ("int4", 64, 0.108),
]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative RMS error, in FP64."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal FP32 [numel]."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def round_trip(taco: Taco, x: torch.Tensor) -> torch.Tensor:
    """Return what arrives."""
    return taco.decode(taco.encode(x), x.shape, x.dtype)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("form", "block", "expected"), GAUSSIAN)
def test_gaussian_error_is_that_of_the_design(form, block, expected, scales):
    x = gaussian(1 << 18)
    error = relative_error(round_trip(Taco(form, block, scales=scales), x), x)
    assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("sigma", [1e-30, 1e-20, 1e-5, 1e-2, 1e2, 1e20, 1e30])
def test_error_does_not_depend_on_the_scale_of_the_data(sigma, scales):
    x = gaussian(1 << 16) * sigma
    assert relative_error(round_trip(Taco(scales=scales), x), x) == pytest.approx(0.026, rel=0.02)
    y = x.bfloat16()
    error = relative_error(round_trip(Taco("int8", scales=scales), y), y)
    assert error == pytest.approx(0.0071, rel=0.05)  # with the BF16 rounding of the result


def test_heavy_tails_and_outlier_channels_have_the_measured_errors():
    generator = torch.Generator().manual_seed(1)
    laplace = torch.distributions.Laplace(0.0, 1.0)
    torch.manual_seed(1)
    tails = laplace.sample((1 << 18,))
    assert relative_error(round_trip(Taco(), tails), tails) == pytest.approx(0.0261, rel=0.02)
    plain = Taco(rotation="none")
    assert relative_error(round_trip(plain, tails), tails) == pytest.approx(0.0255, rel=0.02)
    channels = torch.randn(512, 1024, generator=generator) * 0.01
    channels[:, [100, 500, 900]] *= 60
    for form, rotated, unrotated in (("e4m3", 0.0272, 0.00774), ("int8", 0.00375, 0.0348)):
        with_h, without = Taco(form), Taco(form, rotation="none")
        found = relative_error(round_trip(with_h, channels), channels)
        assert found == pytest.approx(rotated, rel=0.1)
        found = relative_error(round_trip(without, channels), channels)
        assert found == pytest.approx(unrotated, rel=0.1)


@pytest.mark.parametrize("form", ["e4m3", "e5m2", "int8", "int6", "int4"])
def test_dual_and_merged_scales_agree_to_rounding(form):
    x = gaussian(1 << 18, seed=2)
    dual, merged = Taco(form), Taco(form, scales="merged_fp32")
    a, b = round_trip(dual, x), round_trip(merged, x)
    code_bytes = merged.payload_bytes(x.numel()) - 4 * (x.numel() // 256)
    differing = dual.encode(x)[:code_bytes] != merged.encode(x)[:code_bytes]
    assert differing.float().mean() < 3e-5
    same = (~differing.view(-1, code_bytes * 256 // x.numel())).all(1)
    assert same.float().mean() > 0.99
    a, b = a.view(-1, 256)[same], b.view(-1, 256)[same]
    assert relative_error(a, b) < 1e-6
    assert relative_error(a, x.view(-1, 256)[same]) == pytest.approx(
        relative_error(b, x.view(-1, 256)[same]), rel=1e-5
    )


def test_padding_costs_no_accuracy():
    x = gaussian(256 * 8, seed=3)
    for numel in (256 * 7 + 1, 256 * 7 + 128, 256 * 8 - 56):
        part = x[:numel]
        tail = part[256 * 7 :]
        decoded = round_trip(Taco(), part)
        assert relative_error(decoded, part) < 0.03
        assert relative_error(decoded[256 * 7 :], tail) < 0.05
