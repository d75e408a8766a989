"""One part of a list of benchmarks: its command, what it needs, and its small form. Plain data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One benchmark of a list.

    Attributes:
        name: Of its files.
        title: Of its section on the page.
        command: What Python is to run; it takes ``--json FILE``.
        environment: Variables that it is given.
        aim: What it is to reach, for the page; may be empty.
        gpus: How many this machine must have.
        small: The command of the small form, on CPUs; empty if there is none.
        small_title: The title of that; by default the same.
        no_small: Why there is none.
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    aim: str = ""
    gpus: int = 0
    small: tuple[str, ...] = ()
    small_title: str = ""
    no_small: str = ""

    @property
    def shown(self) -> str:
        """The command as a user types it."""
        text = shlex.join(("python", *self.command)).replace(f"{_CHECKOUT}/", "")
        text = text.replace("python -m megatron_taco.cli", "megatron-taco")
        text = text.replace("python -m torch.distributed.run", "torchrun")
        return " ".join([*(f"{k}={v}" for k, v in self.environment.items()), text])

    def in_small_form(self) -> Part:
        """Returns the part that runs on CPUs, without the aim, which is one of GPUs."""
        return replace(
            self,
            title=self.small_title or self.title,
            command=self.small,
            environment=_NO_GPU,
            aim="",
            gpus=0,
        )
