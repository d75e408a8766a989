"""Packages that a configuration asks for and that are not installed: one line before anything runs.

Megatron would find out on one rank, or go on without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_taco.config import Config, Problem

INSTALL_TE = "pip install --no-build-isolation 'megatron-taco[te]'"


def missing(config: Config) -> list[Problem]:
    """One problem for every key whose package is not there; empty if all are.

    Args:
        config: a loaded configuration.
    """
    return [
        config.problem(key, f"{found}: {what} is not installed; {install}, or {instead}")
        for package, key, found, what, install, instead in _wanted(config)
        if find_spec(package) is None
    ]


def _wanted(config: Config) -> Iterator[tuple[str, str, str, str, str, str]]:
    te = ("transformer_engine", "Transformer Engine", INSTALL_TE)
    if config.model.attention == "te":
        yield te[0], "model.attention", "te", *te[1:], "set sdpa"
    if config.megatron.get("transformer_impl") == "transformer_engine":
        yield te[0], "megatron.transformer_impl", "transformer_engine", *te[1:], "set local"
    for name, wanted in (
        ("wandb", config.telemetry.wandb is not None),
        ("tensorboard", config.telemetry.tensorboard),
    ):
        if wanted:
            install = f"pip install 'megatron-taco[{name}]'"
            yield name, f"telemetry.{name}", "asked for", name, install, "leave it out"
