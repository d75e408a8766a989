"""Random numbers by counter, sums by key, and state that keeps its precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_taco.boundaries.random import (
    normal,
    permutation,
    random_below,
    random_bits,
    stream_key,
)
from megatron_taco.boundaries.scatter import segment_sum
from megatron_taco.boundaries.state import FixedPrecision, fingerprint
from tests.unit.boundary_cases import noise


def splitmix64(seed: int, count: int) -> list[int]:
    """SplitMix64 as published, in Python's integers."""
    mask, out = (1 << 64) - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        x = seed
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        out.append(x ^ (x >> 31))
    return out


def test_streams_are_splitmix64():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # published values
    for key in (0, 1234567, (1 << 64) - 3):
        found = [int(x) % (1 << 64) for x in random_bits(key, 20)]
        assert found == splitmix64(key, 20)
        assert torch.equal(random_bits(key, 20)[7:], random_bits(key, 13, start=7))


def test_no_generator_is_touched():
    before = torch.get_rng_state()
    normal(1, (10,))
    permutation(2, 10)
    random_below(3, 10, 5)
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=50, deadline=None, database=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 300))
def test_permutations_are_permutations_and_bounds_are_kept(key, count):
    assert torch.equal(permutation(key, count).sort().values, torch.arange(count))
    below = random_below(key, 50, count)
    assert 0 <= int(below.min()) <= int(below.max()) < count


def test_normal_values_have_the_moments_of_a_gaussian():
    x = normal(stream_key("test", 1), (100_000,))
    moments = [float((x**k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    other = normal(stream_key("test", 2), (100_000,))
    assert abs(float((x * other).mean())) < 0.02
    assert torch.equal(normal(5, (20,))[6:], normal(5, (14,), start=6))


@settings(max_examples=30, deadline=None, database=None)
@given(st.lists(st.integers(0, 6), max_size=40), st.sampled_from([torch.float32, torch.bfloat16]))
def test_segment_sum_is_the_sum_of_each_keys_rows(keys, dtype):
    index = torch.tensor(keys, dtype=torch.int64)
    rows = noise(len(keys), 3).to(dtype)
    expected = torch.zeros(7, 3)
    for key, row in zip(keys, rows.float(), strict=True):
        expected[key] += row
    assert torch.equal(segment_sum(rows, index, 7), expected)


def test_segment_sum_is_reproducible_for_many_rows():
    keys = random_below(1, 40_000, 17)
    rows = noise(40_000, 8)
    first = segment_sum(rows, keys, 17)
    assert all(torch.equal(first, segment_sum(rows, keys, 17)) for _ in range(3))


def test_a_cast_changes_parameters_but_not_fixed_state():
    class Held(FixedPrecision):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("master", noise(4))
            self.register_buffer("absent", None)

    held = nn.Sequential(Held())
    before = held[0].master.clone()
    held.bfloat16()
    assert held[0].weight.dtype == torch.bfloat16
    assert held[0].master.dtype == torch.float32
    assert torch.equal(held[0].master, before)
    assert held.to("meta")[0].master.device.type == "meta"


def test_fingerprints_tell_any_changed_bit():
    x = noise(1000)
    first = fingerprint(x, x.bfloat16())
    assert torch.equal(first, fingerprint(x.clone(), x.bfloat16()))
    for place in (0, 517, 999):
        for bit in (0, 15, 31):
            y = x.clone()
            word = 1 << bit if bit < 31 else -(1 << 31)
            y.view(torch.int32)[place] ^= word
            assert not torch.equal(first, fingerprint(y, x.bfloat16()))
    swapped = x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    assert not torch.equal(first, fingerprint(swapped, x.bfloat16()))
    with pytest.raises(ValueError, match="tensor 0 has 3 bytes"):
        fingerprint(torch.zeros(3, dtype=torch.uint8))
