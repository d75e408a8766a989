"""What a caller relies on: sizes, shapes, dtypes, settings and the messages of refusals."""

import dataclasses
import pickle

import pytest
import torch

from megatron_taco.compressors import Compressor, Taco, build
from megatron_taco.compressors.taco import BLOCKS

BITS = {"e4m3": 8, "e5m2": 8, "int8": 8, "int6": 6, "int4": 4}
SCALE_BYTES = {"dual": 8, "merged_fp32": 4, "merged_bf16": 2}
ARMS = [(form, scales) for form in BITS for scales in SCALE_BYTES]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("form", "scales"), ARMS)
@pytest.mark.parametrize("block", BLOCKS)
def test_payload_bytes_follow_the_formula(form, scales, block):
    taco = Taco(form, block, scales=scales)
    per_block = block * BITS[form] // 8 + SCALE_BYTES[scales]
    for numel in (0, 1, block - 1, block, block + 1, 3 * block, 1001):
        assert taco.payload_bytes(numel) == -(-numel // block) * per_block
    assert taco.block == block


def test_bytes_per_element_are_those_of_the_design():
    numel = 256 * 1000
    assert Taco(scales="dual").payload_bytes(numel) / numel == 1 + 8 / 256
    assert Taco(scales="merged_fp32").payload_bytes(numel) / numel == 1 + 4 / 256
    assert Taco(scales="merged_bf16").payload_bytes(numel) / numel == 1 + 2 / 256


@pytest.mark.parametrize(("form", "scales"), ARMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_elements_comes_back_with_small_error(form, scales, dtype):
    taco = Taco(form, 64, scales=scales)
    bound = {"e4m3": 0.05, "e5m2": 0.1, "int8": 0.02, "int6": 0.06, "int4": 0.25}[form]
    generator = torch.Generator().manual_seed(0)
    for numel in (0, 1, 7, 63, 64, 65, 129, 1000):
        x = torch.randn(numel, generator=generator).to(dtype)
        payload = taco.encode(x)
        assert payload.dtype == torch.uint8
        assert payload.shape == (taco.payload_bytes(numel),)
        assert payload.is_contiguous()
        out = taco.decode(payload, x.shape, dtype)
        assert out.dtype == dtype
        assert out.shape == x.shape
        assert (out.float() - x.float()).norm() <= bound * x.float().norm()


@pytest.mark.parametrize(("form", "scales"), ARMS)
def test_a_row_is_the_payload_of_its_values(form, scales):
    taco = Taco(form, 32, scales=scales)
    for numel in (0, 5, 32, 97):
        x = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
        rows = taco.encode_rows(x)
        assert rows.shape == (3, taco.payload_bytes(numel))
        assert rows.is_contiguous()
        decoded = taco.decode_rows(rows, numel, torch.float32)
        assert decoded.shape == (3, numel)
        assert decoded.is_contiguous()
        for r in range(3):
            assert torch.equal(rows[r], taco.encode(x[r]))
            assert torch.equal(decoded[r], taco.decode(rows[r], (numel,), torch.float32))


@pytest.mark.parametrize("scales", SCALE_BYTES)
def test_payloads_may_lie_at_any_address(scales):
    taco = Taco("int6", 32, scales=scales)
    x = torch.randn(2, 70, generator=torch.Generator().manual_seed(1))
    payloads = taco.encode_rows(x)
    room = torch.zeros(2, payloads.shape[1] + 7, dtype=torch.uint8)
    for offset in range(4):
        shifted = room[:, offset : offset + payloads.shape[1]]
        shifted.copy_(payloads)
        assert torch.equal(taco.decode_sum(shifted, 70), taco.decode_sum(payloads, 70))
        one = taco.decode(shifted[0], (70,), torch.float32)
        assert torch.equal(one, taco.decode(payloads[0], (70,), torch.float32))


def test_strides_shape_and_gradients_of_the_input_do_not_matter():
    taco = Taco(block=32)
    x = torch.randn(6, 10, 4, generator=torch.Generator().manual_seed(2))
    expected = taco.encode(x.permute(2, 0, 1).contiguous())
    kept = x.clone()
    assert torch.equal(taco.encode(x.permute(2, 0, 1)), expected)
    assert torch.equal(taco.encode(x.clone().requires_grad_().permute(2, 0, 1)), expected)
    assert not taco.encode(x.clone().requires_grad_()).requires_grad
    one_block = x.flatten()[:32].clone()
    for rotation in ("hadamard", "none"):
        Taco(block=32, rotation=rotation).encode(one_block)
    assert torch.equal(x, kept)
    assert torch.equal(one_block, kept.flatten()[:32])
    assert taco.decode(expected, (4, 6, 10), torch.bfloat16).shape == (4, 6, 10)


@pytest.mark.parametrize(("form", "scales"), ARMS)
def test_payloads_are_left_as_they_were(form, scales):
    taco = Taco(form, 32, scales=scales)
    payloads = taco.encode_rows(torch.randn(2, 32, generator=torch.Generator().manual_seed(3)))
    kept = payloads.clone()
    taco.decode_rows(payloads, 32, torch.float32)
    taco.decode_sum(payloads, 32)
    taco.reduce_encode(payloads, 32)
    taco.nonfinite_blocks(payloads, 32)
    assert torch.equal(payloads, kept)


def test_the_same_input_gives_the_same_bytes():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(4)).bfloat16()
    first = Taco().encode(x)
    torch.manual_seed(99)
    assert torch.equal(Taco().encode(x.clone()), first)
    assert torch.equal(Taco().encode(x.float()), first)
    assert torch.equal(Taco().encode_rows(torch.stack([x * 3, x]))[1], first)


def test_settings_are_immutable_comparable_and_picklable():
    taco = build("taco", format="int8", block=64, scales="merged_fp32")
    assert isinstance(taco, Compressor)
    assert taco == Taco("int8", 64, scales="merged_fp32")
    taco.encode(torch.ones(3))
    assert pickle.loads(pickle.dumps(taco)) == taco
    assert hash(taco) == hash(Taco("int8", 64, scales="merged_fp32"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        taco.block = 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "fp4"}, "format is 'fp4', allowed are e4m3, e5m2, int8, int6, int4"),
        ({"block": 100}, "block is 100, allowed are 32, 64, 128, 256, 512"),
        ({"block": 256.0}, "block is 256.0, allowed are"),
        ({"rotation": "dct"}, "rotation is 'dct', allowed are hadamard, none"),
        ({"scales": "e8m0"}, "scales is 'e8m0', allowed are dual, merged_fp32, merged_bf16"),
        ({"published_clips": 1}, "published_clips is 1, allowed are False, True"),
        (
            {"published_clips": True, "scales": "merged_fp32"},
            "published_clips needs scales to be 'dual', found 'merged_fp32'",
        ),
        (
            {"published_clips": True, "format": "int8"},
            "published_clips needs format to be one of e4m3, e5m2, found 'int8'",
        ),
        ({"blocks": 64}, "no setting 'blocks', .*did you mean 'block'"),
        ({"name": "taco"}, "no setting 'name'|multiple values"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build("taco", **settings)


def test_an_unknown_compressor_is_refused():
    with pytest.raises(ValueError, match="compressor is 'tacos', allowed are block_integer, taco"):
        build("tacos")


def test_bad_tensors_are_refused_with_what_was_found():
    taco = Taco(block=32)
    good = taco.encode(torch.ones(40))
    with pytest.raises(TypeError, match=r"shape \(1, 2\) has dtype torch.int64, allowed are"):
        taco.encode(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"torch\.float64"):
        taco.encode_rows(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\[rows, numel\] tensor, found shape \(3,\)"):
        taco.encode_rows(torch.ones(3))
    with pytest.raises(TypeError, match=r"output asked for has dtype torch\.int32"):
        taco.decode(good, (40,), torch.int32)
    with pytest.raises(TypeError, match=r"payloads of shape .* have dtype torch\.int8"):
        taco.decode(good.view(torch.int8), (40,), torch.float32)
    with pytest.raises(ValueError, match=r"shape \(1, 80\), expected \[rows >= 1, 120 bytes\]"):
        taco.decode(good, (65,), torch.float32)
    with pytest.raises(ValueError, match="one dimension"):
        taco.decode(good.view(2, -1), (40,), torch.float32)
    for method in (taco.decode_sum, taco.reduce_encode, taco.nonfinite_blocks):
        with pytest.raises(ValueError, match="for 65 elements"):
            method(good.unsqueeze(0), 65)
        with pytest.raises(ValueError, match=r"shape \(0, 80\)"):
            method(good.unsqueeze(0)[:0], 40)
    with pytest.raises(ValueError, match="numel is -1"):
        taco.payload_bytes(-1)


@pytest.mark.parametrize(("form", "scales"), ARMS)
def test_results_go_where_they_are_asked_to(form, scales):
    taco = Taco(form, 32, scales=scales)
    x = torch.randn(2, 70, generator=torch.Generator().manual_seed(5))
    payloads = taco.encode_rows(x)
    size = payloads.shape[1]
    for shift in (0, 1, 4):  # any address
        room = torch.zeros(shift + 2 * size, dtype=torch.uint8)[shift:]
        assert taco.encode_rows(x, room.view(2, size)).data_ptr() == room.data_ptr()
        assert torch.equal(room.view(2, size), payloads)
        one = room[:size]
        assert taco.reduce_encode(payloads, 70, one).data_ptr() == one.data_ptr()
        assert torch.equal(one, taco.reduce_encode(payloads, 70))
        for dtype in DTYPES:
            values = torch.zeros(shift + 140, dtype=dtype)[shift:].view(2, 70)
            taco.decode_rows(payloads, 70, dtype, values)
            assert torch.equal(values, taco.decode_rows(payloads, 70, dtype))
            taco.decode_sum(payloads, 70, values[0])
            assert torch.equal(values[0], taco.decode_sum(payloads, 70).to(dtype))


def test_a_wrong_place_for_results_is_refused():
    taco = Taco(block=32)
    x = torch.ones(2, 64)
    payloads = taco.encode_rows(x)
    size = payloads.shape[1]
    with pytest.raises(TypeError, match=r"out is torch.int8.* on cpu, allowed are torch.uint8"):
        taco.encode_rows(x, torch.zeros(2, size, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"expected contiguous \[2, \d+\] on cpu"):
        taco.encode_rows(x, torch.zeros(2, size + 1, dtype=torch.uint8)[:, :size])
    with pytest.raises(ValueError, match=r"expected contiguous \[64\] on cpu"):
        taco.decode_sum(payloads, 64, torch.zeros(65))
    with pytest.raises(TypeError, match=r"allowed are torch\.float32, torch\.bfloat16"):
        taco.decode_sum(payloads, 64, torch.zeros(64, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"allowed are torch.bfloat16"):
        taco.decode_rows(payloads, 64, torch.bfloat16, torch.zeros(2, 64))
    with pytest.raises(ValueError, match="on meta"):
        taco.reduce_encode(payloads, 64, torch.zeros(size, dtype=torch.uint8, device="meta"))
