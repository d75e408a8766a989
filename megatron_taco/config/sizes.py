"""Sizes in bytes, as people write them: 1048576, 1MiB, 512KiB, 10MB."""

import re
from fractions import Fraction
from typing import Final

UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)\Z")


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Args:
        value: A non-negative integer, or a string of a number and a unit (`UNITS`, case counts).

    Raises:
        ValueError: It is neither, or not a whole number of bytes.
    """
    allowed = "allowed: a whole number of bytes, or with a unit, for example 1MiB, 512KiB or 10MB"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; {allowed}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative; {allowed}")
        return value
    match = _SIZE.match(value)
    if match is None or match.group(2) not in UNITS:
        by_lower = {unit.lower(): unit for unit in UNITS}
        unit = by_lower.get(match.group(2).lower()) if match else None
        hint = f" (nearest: {match.group(1)}{unit})" if match and unit else ""
        raise ValueError(f"{value!r} is not a size; {allowed}{hint}")
    size = Fraction(match.group(1)) * UNITS[match.group(2)]
    if size.denominator != 1:
        raise ValueError(f"{value!r} is not a whole number of bytes; {allowed}")
    return int(size)
