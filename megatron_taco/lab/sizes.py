"""Lists of message sizes, as people write them."""

from __future__ import annotations

from megatron_taco.config.sizes import parse_size


def parse_bytes(text: str) -> int:
    """Returns the size in bytes of ``16MiB``, ``64KB`` or ``4096``.

    Raises:
        ValueError: It is none, or is nothing.
    """
    size = parse_size(int(text) if text.isdigit() else text)
    if size < 1:
        raise ValueError(f"{text!r} is a size of nothing; at least 1 byte is needed")
    return size


def parse_sizes(text: str) -> list[int]:
    """Returns the sizes in bytes of a list such as ``1MiB,16MiB,4096``.

    Raises:
        ValueError: One of them is none, or is nothing.
    """
    return [parse_bytes(word.strip()) for word in text.split(",")]
