"""Philox against its published vectors, and what random rounding may depend on."""

import pytest
import torch

from megatron_taco.compressors.counter_random import key_of, philox, uniform

# From the known-answer tests of the authors' Random123 library: philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_numbers_are_uniform_and_depend_on_position_and_key_alone():
    u = uniform(100_003, 7, torch.device("cpu"))
    assert torch.equal(u[:1001], uniform(1001, 7, torch.device("cpu")))
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=10, min=0, max=1)
    assert (counts / len(u) - 0.1).abs().max() < 0.005
    other = uniform(100_003, 8, torch.device("cpu"))
    correlation = torch.corrcoef(torch.stack([u, other]))[0, 1]
    assert correlation.abs() < 0.02


def test_keys_differ_by_every_part_and_by_type():
    parts = [("a", 1, 2), ("a", 2, 1), ("a", 12), ("a", "1", 2), ("a1", 2), (1, "a", 2)]
    keys = {key_of(*p) for p in parts}
    assert len(keys) == len(parts)
    assert all(0 <= key < 2**64 for key in keys)
    assert key_of("a", 1, 2) == key_of("a", 1, 2)
