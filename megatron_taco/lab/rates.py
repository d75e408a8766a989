"""Rates of links as people write them (200Mbit, 10Gbit), and what follows from a rate."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

UNITS: Final = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
"""Bits per second of a unit; case does not count."""

LARGEST_TBF: Final = 8 * (2**32 - 1)
"""Bits per second: the ``tbf`` qdisc's rate is a 32-bit number of bytes per second."""
LARGEST: Final = 400 * 10**9
"""Bits per second: the fastest network cards; long before, the machine is the slower of the two."""
SMALLEST: Final = 1_000_000
"""Bits per second: below, the smallest burst is no longer small."""

_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)\Z")
_SMALL_BURST: Final = 64_000
_LARGE_BURST: Final = 256_000
_LARGEST_BURST: Final = 1_000_000


def parse_rate(text: str) -> int:
    """Returns a rate in bits per second.

    Args:
        text: A number and a unit of ``UNITS``.

    Raises:
        ValueError: It is none, or is outside ``SMALLEST`` .. ``LARGEST``.
    """
    allowed = "allowed: a number of bit, kbit, Mbit or Gbit per second, for example 200Mbit"
    match = _RATE.match(text)
    by_lower = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or match.group(2).lower() not in by_lower:
        raise ValueError(f"{text!r} is not a rate; {allowed}")
    rate = Fraction(match.group(1)) * by_lower[match.group(2).lower()]
    if not SMALLEST <= rate <= LARGEST:
        raise ValueError(
            f"{text!r} is outside what the lab can make: "
            f"{format_rate(SMALLEST)} to {format_rate(LARGEST)}"
        )
    return int(rate)


def format_rate(rate: int) -> str:
    """Returns the shortest text that :func:`parse_rate` turns into ``rate`` bits per second."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if rate >= factor and (rate * 1000) % factor == 0:
            return f"{rate / factor:.3f}".rstrip("0").rstrip(".") + unit
    return f"{rate}bit"


def default_burst(rate: int) -> int:
    """Returns the token bucket's size in bytes for ``rate`` bits per second.

    It has to be small: the bucket fills while ranks compute, and then gives every message a free
    start. 64 kB up to 1 Gbit and 256 kB at 10 and 25 Gbit were measured to hold the rate; above,
    1 MB is what passes between two ticks of the kernel's timer of some 80 µs.
    """
    if rate <= UNITS["Gbit"]:
        return _SMALL_BURST
    return _LARGE_BURST if rate <= LARGEST_TBF else _LARGEST_BURST


def wire_seconds(size: int, rate: int) -> float:
    """Returns the seconds that ``size`` bytes take at ``rate`` bits per second."""
    return size * 8 / rate
