"""Quantisers: sizes, errors, special values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.boundaries.affine import AffineHadamard
from megatron_taco.boundaries.quantizers import Plain, Quantizer, blockwise, is_plain
from megatron_taco.boundaries.tah_quant import TahQuant
from tests.unit.boundary_cases import noise, relative_error

ALL = [
    pytest.param(Plain(), id="none"),
    pytest.param(blockwise("int8", 64), id="int8"),
    pytest.param(blockwise("int4", 64), id="int4"),
    pytest.param(blockwise("e4m3", 64), id="e4m3"),
    pytest.param(AffineHadamard(), id="affine"),
    pytest.param(TahQuant(), id="tah_quant"),
]
LOSSY = ALL[1:]
SHAPE = (9, 3, 64)


def heavy_tails(*shape: int) -> torch.Tensor:
    """Return values of which some are far larger than the rest, as activations have them."""
    x = noise(*shape)
    return x * (1 + 20 * (noise(*shape, seed=1) > 2.5))


@pytest.mark.parametrize("quantizer", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_and_as_a_message_give_the_same(quantizer, dtype):
    x = heavy_tails(*SHAPE).to(dtype)
    message = quantizer.pack(x, learn=True)
    assert message.dtype == torch.uint8
    assert message.is_contiguous()
    assert tuple(message.shape) == (quantizer.message_bytes(SHAPE, dtype, learn=True),)
    arrived = quantizer.unpack(message.clone(), SHAPE, dtype, learn=True)
    assert arrived.dtype == dtype
    assert torch.equal(arrived, quantizer.cross(x, learn=True))
    assert torch.equal(message, quantizer.pack(x.clone(), learn=False))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(message, quantizer.pack(strided, learn=False))


@pytest.mark.parametrize("quantizer", ALL)
def test_messages_of_another_size_are_refused(quantizer):
    message = quantizer.pack(noise(*SHAPE), learn=False)
    for bad in (message[:-1], message.view(1, -1), message.float()):
        with pytest.raises(ValueError, match=r"a message is .*, expected torch.uint8"):
            quantizer.unpack(bad, SHAPE, torch.float32, learn=False)


@pytest.mark.parametrize(
    ("quantizer", "octets"),
    [
        (Plain(), 2.0),
        (blockwise("int8", 256), 1 + 4 / 256),
        (blockwise("e4m3", 512), 1 + 4 / 256),
        (blockwise("int4", 96), 0.5 + 4 / 32),
        (AffineHadamard(128), 1 + 8 / 128),
        (TahQuant(), (0.8 * 32 + 0.2 * 24 + 5) / 64),
    ],
)
def test_bytes_a_value(quantizer, octets):
    shape = (40, 2, 768)
    numel = 40 * 2 * 768
    assert quantizer.encoded_bytes(shape, torch.bfloat16) == pytest.approx(octets * numel, rel=1e-3)


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (blockwise("int8", 256), 0.00694),
        (blockwise("int8", 256, rotation="none"), 0.00697),
        (blockwise("int4", 256), 0.126),
        (blockwise("int4", 256, block=32), 0.0971),
        (blockwise("e4m3", 256), 0.026),
        (AffineHadamard(128), 0.00584),
        (TahQuant(), 0.1205),
    ],
)
def test_gaussian_error(quantizer, expected):
    x = noise(64, 8, 256)
    assert relative_error(quantizer.cross(x, False), x) == pytest.approx(expected, rel=0.03)


def test_an_offset_costs_an_affine_quantiser_nothing():
    x = noise(64, 2, 128)
    rotated_offset = torch.zeros(128)
    rotated_offset[0] = 100.0  # a constant in the rotated domain
    shifted = x + rotated_offset
    affine = relative_error(AffineHadamard(128).cross(shifted, False) - rotated_offset, x)
    symmetric = blockwise("int8", 128, 128).cross(shifted, False) - rotated_offset
    assert affine < 0.01
    assert relative_error(symmetric, x) > 3 * affine


def test_tah_quant_gives_four_bits_to_tiles_of_high_entropy():
    x = noise(50, 1, 64)
    x[::5, :, ::2] *= 0.001  # a fifth of the tiles: half of the values are nothing
    decoded = TahQuant().cross(x, False)
    spread = (x.amax(2) - x.amin(2)).flatten()
    error = (decoded - x).abs().amax(2).flatten() / spread
    expected = torch.full((50,), 0.5 / 15)
    expected[::5] = 0.5 / 7
    assert (error <= expected * 1.01 + 1e-3).all()
    assert (error[::5] > 0.5 / 15 * 1.1).all()


def test_tah_quant_rotates_tiles_with_an_outlier():
    plain = noise(20, 1, 64)
    x = plain.clone()
    places = torch.arange(20) * 3
    x[torch.arange(20), 0, places] = 60.0
    decoded = TahQuant().cross(x, False)
    assert float((decoded - x).abs().max()) < 5.0
    rest = torch.ones_like(x, dtype=torch.bool)
    rest[torch.arange(20), 0, places] = False
    # unrotated, the step of 3 or 4 bits over a range of 63 leaves nothing of the small values
    assert relative_error(decoded[rest], x[rest]) < 1.3
    assert float((decoded[~rest] - 60.0).abs().max()) < 3.0


@pytest.mark.parametrize("quantizer", LOSSY)
def test_zeros_and_constants_come_back(quantizer):
    zeros = quantizer.cross(torch.zeros(*SHAPE), False)
    assert not zeros.any()
    constant = quantizer.cross(torch.full(SHAPE, 3.0), False)
    assert relative_error(constant, torch.full(SHAPE, 3.0)) < 0.03


@pytest.mark.parametrize("quantizer", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_and_no_other(quantizer, bad):
    x = noise(*SHAPE)
    x[4, 1, 5] = bad
    decoded = quantizer.cross(x, False)
    at = (4 * SHAPE[1] + 1) * SHAPE[2] + 5
    block = 128 if isinstance(quantizer, AffineHadamard) else 64
    flat = decoded.flatten()
    first = at // block * block
    assert flat[first : first + block].isnan().all()
    assert int(flat.isnan().sum()) == block


@pytest.mark.parametrize("quantizer", [AffineHadamard(32), TahQuant()])
def test_errors_are_within_half_a_step(quantizer):
    def check(values: list[float]) -> None:
        x = torch.tensor(values).view(2, 1, 64)
        decoded = quantizer.cross(x, False)
        assert decoded.isfinite().all()
        spread = float(x.abs().max()) * 2
        # half a step of 3 bits, in a rotated tile a few times that; FP16 scales
        limit = spread * (4.0 if isinstance(quantizer, TahQuant) else 0.1) / 7
        assert float((decoded - x).abs().max()) <= limit + 1e-4

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=128, max_size=128))
    def law(values: list[float]) -> None:
        check(values)

    law()


@pytest.mark.parametrize("largest", [1e-38, 1e-20, 2e37])
def test_an_affine_block_may_have_any_magnitude(largest):
    x = noise(4, 1, 128)
    x *= largest / float(x.abs().max())
    assert relative_error(AffineHadamard(128).cross(x, False), x) < 0.007


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="quantizer is 'int5', allowed are int8, int4, e4m3"):
        blockwise("int5", 64)
    with pytest.raises(ValueError, match="block is 100"):
        blockwise("int8", 64, 100)
    with pytest.raises(ValueError, match="affine: block is 100, allowed are 32"):
        AffineHadamard(100)
    with pytest.raises(ValueError, match="the hidden size is 100, allowed are multiples of 64"):
        TahQuant().encode(noise(2, 2, 100))
    for quantizer in (param.values[0] for param in LOSSY):
        assert isinstance(quantizer, Quantizer)
        with pytest.raises(TypeError, match="float64"):
            quantizer.encode(noise(*SHAPE).double())
        assert not is_plain(quantizer)
    assert is_plain(Plain())
