"""Code formats: rounding and saturation against tables, and packing as a round trip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.compressors.formats import FORMAT_NAMES, code_format
from tests.unit.test_compressors_definition import LIMITS, TABLES, pack, to_code

INTEGERS = ("int8", "int6", "int4")


def column(values) -> torch.Tensor:
    """Return one block, the values padded to a multiple of 32, as a column."""
    x = torch.as_tensor(values, dtype=torch.float32).reshape(-1)
    return torch.nn.functional.pad(x, (0, -len(x) % 32)).unsqueeze(1)


@pytest.mark.parametrize("form", TABLES)
def test_fp8_rounds_to_nearest_even_and_saturates(form):
    table = torch.from_numpy(TABLES[form]).float()
    between = (table[1:] + table[:-1]) / 2
    near = torch.cat([between * (1 - 2.0**-20), between, between * (1 + 2.0**-20), table])
    wide = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 200
    beyond = torch.tensor([LIMITS[form] * 1.03, 1e9, 3e38, 1e-30, 0.0])
    x = torch.cat([near, wide, beyond])
    x = torch.cat([x, -x])
    codes = code_format(form).pack(column(x)).squeeze(1)[: len(x)]
    assert codes.tolist() == [to_code(form, value) for value in x.numpy()]


@pytest.mark.parametrize("form", INTEGERS)
def test_integers_round_half_to_even_and_saturate(form):
    limit = LIMITS[form]
    x = torch.cat([torch.arange(-limit - 1, limit + 1, 0.25), torch.tensor([1e30, -1e30])])
    codes = code_format(form).pack(column(x))
    values = code_format(form).unpack(codes).squeeze(1)[: len(x)]
    assert values.tolist() == [to_code(form, value) for value in x.numpy()]
    assert values.abs().max() == limit


@pytest.mark.parametrize("form", TABLES)
def test_every_finite_fp8_code_is_read_as_torch_reads_it(form):
    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    dtype = torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2
    expected = codes.view(dtype).float()
    finite = expected.isfinite()
    assert finite.sum() == 2 * len(TABLES[form])
    found = code_format(form).unpack(codes)
    assert torch.equal(found[finite], expected[finite])
    assert torch.equal(found[finite].signbit(), expected[finite].signbit())


@pytest.mark.parametrize("form", INTEGERS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_packing_integers_is_a_bit_stream_and_a_round_trip(form, data):
    limit = int(LIMITS[form])
    code = code_format(form)
    shape = (32, data.draw(st.integers(1, 3)))
    count = shape[0] * shape[1]
    values = data.draw(st.lists(st.integers(-limit, limit), min_size=count, max_size=count))
    x = torch.tensor(values, dtype=torch.float32).view(shape)
    packed = code.pack(x.clone())
    assert packed.shape == (32 * code.bits // 8, shape[1])
    assert torch.equal(code.unpack(packed), x)
    for block in range(shape[1]):
        stream = pack(form, [int(v) for v in x[:, block]])
        assert bytes(packed[:, block].tolist()) == stream


def test_an_unknown_format_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="'fp4', allowed are " + ", ".join(FORMAT_NAMES)):
        code_format("fp4")
