"""The data set that comes with Python itself, prepared for Megatron where a run asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_taco.config import Config


@dataclass(frozen=True)
class Embedded:
    """A prepared data set.

    Attributes:
        digest: of its contents, which all machines of a run must share.
        prefixes: of Megatron's files, by ``train`` and ``valid``.
    """

    digest: str
    prefixes: dict[str, str]


def embedded_data(config: Config) -> Embedded | None:
    """Prepare ``data.source: python-stdlib``, once on a machine; None for other data.

    Args:
        config: The configuration.
    """
    if config.data.source != "python-stdlib":
        return None
    from megatron_taco.data import load_tokenizer, stdlib

    named = config.data.tokenizer
    tokenizer = load_tokenizer(f"hf:{named.path}" if named.kind == "hf" else named.kind)
    data = stdlib.prepare(Path(config.data.cache), tokenizer)
    prefixes = {"train": str(data.train_prefix), "valid": str(data.valid_prefix)}
    return Embedded(data.digest, prefixes)
