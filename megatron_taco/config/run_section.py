"""Sections `run` and `telemetry`: where a run lives and what it records."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megatron_taco.config.section import Section


def _folder_name(value: str) -> str:
    if not value or value in (".", "..") or any(character in value for character in "/\\\0"):
        raise ValueError(f"{value!r} is not a folder name; allowed: a name without '/'")
    return value


class Run(Section):
    """Where a run is kept and where it runs.

    Attributes:
        name: Name of the run and of its folder.
        dir: Folder that holds the runs.
        device: `auto` takes GPUs if there are any.
        quiet: Send Megatron's own output to log files in the run folder, not to the console.
    """

    name: Annotated[str, AfterValidator(_folder_name)] = "run"
    dir: str = Field(default="runs", min_length=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quiet: bool = True

    @property
    def folder(self) -> Path:
        """The run folder, `dir/name`."""
        return Path(self.dir) / self.name


class Wandb(Section):
    """Weights & Biases, written by Megatron's own writer.

    Attributes:
        project: Name of the project.
        entity: Team or user, if not the default one.
        mode: `offline` keeps the records on disk.
    """

    project: str = Field(min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class Telemetry(Section):
    """What is recorded beside the loss.

    Attributes:
        error_every: Measure the relative error of compression every so many steps; 0 never.
        tensorboard: Write TensorBoard events into the run folder.
        wandb: Where to send the same numbers, if anywhere.
    """

    error_every: int = Field(default=20, ge=0)
    tensorboard: bool = False
    wandb: Wandb | None = None
