"""Rates and sizes: what is understood, what is refused, what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.lab import rates, sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200Mbit", 200_000_000),
        ("1Gbit", 1_000_000_000),
        ("10gbit", 10_000_000_000),
        ("2.5Gbit", 2_500_000_000),
        ("100Gbit", 100_000_000_000),
        ("25 Gbit", 25_000_000_000),
        ("1500kbit", 1_500_000),
    ],
)
def test_rates_are_bits_per_second(text: str, expected: int) -> None:
    assert rates.parse_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10", "is not a rate"),
        ("10G", "is not a rate"),
        ("10GB", "is not a rate"),
        ("-1Gbit", "is not a rate"),
        ("fast", "is not a rate"),
        ("999kbit", "outside"),
        ("401Gbit", "outside"),
        ("0Gbit", "outside"),
    ],
)
def test_what_is_no_rate_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        rates.parse_rate(text)
    assert repr(text) in str(caught.value)


@given(st.integers(rates.SMALLEST, rates.LARGEST))
def test_a_formatted_rate_is_the_same_rate(rate: int) -> None:
    assert rates.parse_rate(rates.format_rate(rate)) == rate


def test_bursts_are_small_against_what_is_sent_in_a_millisecond_or_two() -> None:
    assert rates.default_burst(200_000_000) == 64_000
    assert rates.default_burst(1_000_000_000) == 64_000
    assert rates.default_burst(10_000_000_000) == 256_000
    assert rates.default_burst(100_000_000_000) == 1_000_000


def test_wire_seconds() -> None:
    assert rates.wire_seconds(125_000_000, 1_000_000_000) == 1.0


def test_size_lists() -> None:
    assert sizes.parse_sizes("1MiB, 16MiB,4096") == [1 << 20, 16 << 20, 4096]
    for text in ("", "1MiB,", "0", "1XB"):
        with pytest.raises(ValueError, match="size"):
            sizes.parse_sizes(text)
