"""The quantiser of SDP4Bit: its definition, error, bytes, rounding and special values."""

import pytest
import torch

from megatron_taco.compressors import BlockInteger, Taco, build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRADIENTS = BlockInteger(bits=4, block=128, transform=32, scale="bf16")
WEIGHTS = BlockInteger(bits=4, block=2048, transform=1, scale="fp32")
INSIDE_NODE = BlockInteger(bits=8, block=512, transform=1, scale="fp32")
ARMS = (GRADIENTS, WEIGHTS, INSIDE_NODE, BlockInteger(6, 64, 64, "fp32"))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sylvester(order: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < order:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h / order**0.5


def by_definition(x: torch.Tensor, c: BlockInteger) -> torch.Tensor:
    """Decoded values in FP64, one group at a time; ``x`` fills whole groups."""
    limit = 2 ** (c.bits - 1) - 1
    h = sylvester(c.transform)
    out = []
    for group in x.double().split(c.block):
        y = (group.view(-1, c.transform) @ h).view(-1)
        mantissa, exponent = torch.frexp(y.abs().max() / limit)
        scale = torch.ldexp((mantissa * 2**17 + 0.5).floor() / 2**17, exponent)
        if c.scale == "bf16":
            scale = scale.float().bfloat16()
        q = (y / scale.double()).clamp(-limit, limit).round()
        out.append(((q * scale.double()).view(-1, c.transform) @ h).view(-1))
    return torch.cat(out)


@pytest.mark.parametrize("c", ARMS)
def test_values_are_those_of_the_definition(c):
    x = noise(4096) * 3e-4
    found = c.decode(c.encode(x), x.shape, torch.float32).double()
    expected = by_definition(x, c)
    step = expected.abs().max() * 2 / 2**c.bits
    differing = ((found - expected).abs() > 1e-5 * step).double().mean()
    assert differing < 0.002 * c.transform  # a tie broken the other way moves a whole transform
    assert (found - expected).norm() < 0.01 * (expected - x.double()).norm()


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("scale", ["fp32", "bf16"])
def test_with_one_order_it_is_taco_with_merged_scales(bits, scale):
    """Two independent ways to the same bytes, sums included."""
    ours = BlockInteger(bits, 128, 128, scale)
    taco = Taco(f"int{bits}", 128, scales=f"merged_{scale}")
    x = noise(3, 1000) * torch.tensor([[1.0], [1e-3], [1e4]])
    payloads = ours.encode_rows(x)
    assert torch.equal(payloads, taco.encode_rows(x))
    assert torch.equal(ours.decode_sum(payloads, 1000), taco.decode_sum(payloads, 1000))
    assert torch.equal(ours.reduce_encode(payloads, 1000), taco.reduce_encode(payloads, 1000))
    decoded = ours.decode_rows(payloads, 1000, torch.bfloat16)
    assert torch.equal(decoded, taco.decode_rows(payloads, 1000, torch.bfloat16))


def test_bytes_are_within_the_bounds_of_the_data_parallel_axis():
    n = 2**20
    assert GRADIENTS.payload_bytes(n) / (4 * n) == (4 + 16 / 128) / 32 <= 0.14
    assert WEIGHTS.payload_bytes(n) / (2 * n) == (4 + 32 / 2048) / 16 <= 0.26
    assert GRADIENTS.payload_bytes(0) == 0
    assert GRADIENTS.payload_bytes(1) == 66


@pytest.mark.parametrize("c", ARMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_size_comes_back_and_a_row_is_a_payload(c, dtype):
    bound = {8: 0.02, 6: 0.06, 4: 0.3}[c.bits]
    for numel in (0, 1, 31, c.block, c.block + 1, 3001):
        x = noise(2, numel, seed=numel).to(dtype)
        rows = c.encode_rows(x)
        assert rows.shape == (2, c.payload_bytes(numel))
        assert torch.equal(rows[1], c.encode(x[1]))
        decoded = c.decode_rows(rows, numel, dtype)
        assert decoded.dtype == dtype
        assert (decoded.float() - x.float()).norm() <= bound * x.float().norm()


def test_sums_are_of_decoded_values_in_rank_order():
    x = noise(4, 1000) * torch.tensor([[1.0], [10.0], [0.1], [100.0]])
    payloads = GRADIENTS.encode_rows(x)
    values = GRADIENTS.decode_rows(payloads, 1000, torch.float32)
    total = GRADIENTS.decode_sum(payloads, 1000)
    assert (total - values.sum(0)).norm() < 1e-6 * total.norm()
    again = GRADIENTS.decode(GRADIENTS.reduce_encode(payloads, 1000), (1000,), torch.float32)
    once = GRADIENTS.decode(GRADIENTS.encode(total), (1000,), torch.float32)
    assert (again - once).norm() < 1e-3 * once.norm()
    half = torch.empty(1000, dtype=torch.bfloat16)
    assert GRADIENTS.decode_sum(payloads, 1000, out=half) is half
    assert torch.equal(half, total.bfloat16())


@pytest.mark.parametrize("c", ARMS)
def test_special_groups(c):
    x = noise(4 * c.block)
    x[: c.block] = 0
    x[c.block + 3] = float("nan")
    x[2 * c.block + 5] = float("inf")
    payload = c.encode(x)
    decoded = c.decode(payload, x.shape, torch.float32).view(4, -1)
    assert not decoded[0].view(torch.int32).any()
    assert decoded[1:3].isnan().all()
    assert decoded[3].isfinite().all()
    assert torch.equal(decoded[3], c.decode(c.encode(x[3 * c.block :]), (c.block,), torch.float32))
    assert int(c.nonfinite_blocks(payload.unsqueeze(0), 4 * c.block)) == 2
    both = torch.stack([payload, c.encode(noise(4 * c.block, seed=1))])
    assert c.decode_sum(both, 4 * c.block).view(4, -1)[1:3].isnan().all()
    reduced = c.decode(c.reduce_encode(both, 4 * c.block), x.shape, torch.float32).view(4, -1)
    assert reduced[1:3].isnan().all()
    assert reduced[[0, 3]].isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-37, 1e30, 2e37])
def test_the_ends_of_the_range_stay_finite(magnitude):
    x = noise(256).clamp(-1, 1) * magnitude
    decoded = GRADIENTS.decode(GRADIENTS.encode(x), x.shape, torch.float32)
    assert decoded.isfinite().all()
    assert (decoded.double() - x.double()).norm() < 0.2 * x.double().norm()


def test_stochastic_rounding_is_unbiased_and_a_function_of_its_key():
    c = BlockInteger(4, 128, 1, "fp32", "stochastic")
    x = noise(512)
    payloads = torch.stack([c.keyed(key).encode(x) for key in range(400)])
    assert torch.equal(payloads[7], c.keyed(7).encode(x))
    assert not torch.equal(payloads[7], payloads[8])
    mean = c.decode_rows(payloads, 512, torch.float32).mean(0)
    step = x.view(4, -1).abs().amax(1).max() / 7
    # The variance of one rounding is at most step^2 / 4.
    assert (mean - x).abs().max() < 5 * step / 2 / 400**0.5
    nearest = BlockInteger(4, 128, 1, "fp32")
    bias = nearest.decode(nearest.encode(x), x.shape, torch.float32) - x
    assert bias.abs().max() > 5 * step / 2 / 400**0.5
    assert nearest.keyed(5) is nearest


def test_stochastic_rounding_moves_no_exact_code():
    c = BlockInteger(4, 32, 1, "fp32", "stochastic").keyed(3)
    x = torch.arange(-7.0, 8.0).repeat(3)
    assert torch.equal(c.decode(c.encode(x), x.shape, torch.float32), x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "bits is 5, allowed are 8, 6, 4"),
        ({"block": 100}, "block is 100, allowed are 32"),
        ({"transform": 16}, "transform is 16, allowed are 1, 32"),
        ({"transform": 512}, "transform is 512, allowed are at most the block, 128"),
        ({"scale": "fp16"}, "scale is 'fp16', allowed are fp32, bf16"),
        ({"rounding": "up"}, "rounding is 'up', allowed are nearest, stochastic"),
        ({"group": 64}, "there is no setting 'group'"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        build("block_integer", **settings)
