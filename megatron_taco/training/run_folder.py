"""The run folder: resolved configuration, environment, policy, metrics, logs, checkpoints."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_taco.data.locking import file_lock

_DESCRIPTIONS = ("config.yaml", "environment.json", "policy.json", "data-policy.json")
_RESULTS = ("metrics.jsonl", "logs", "tensorboard", "wandb")
_PACKAGES = ("torch", "megatron-core", "triton", "transformer-engine", "numpy", "megatron-taco")


def versions() -> dict[str, str | None]:
    """Versions of the packages that decide what a rank computes and sends; None where absent."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def environment() -> dict[str, Any]:
    """Versions, host and devices of this process, for ``environment.json``."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "versions": versions(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "argv": sys.argv,
    }


def published_environment() -> dict[str, Any]:
    """As :func:`environment`, without what names one machine: its host and its folders."""
    return {key: value for key, value in environment().items() if key not in ("host", "argv")}


class RunFolder:
    """``<dir>/<name>``; rank 0 makes it, every rank may log into it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.policy = path / "policy.json"
        self.checkpoints = path / "checkpoints"

    @contextlib.contextmanager
    def claimed(self, resolved: str, *, resume: bool) -> Iterator[None]:
        """Make the folder, keep other runs out, write what describes the run; rank 0 calls it.

        Nothing of an earlier run in the folder is lost.  Its files move to ``previous-<n>``; a run
        that resumes goes on with its metrics and logs, and only the descriptions move.

        Args:
            resolved: the resolved configuration as YAML.
            resume: whether this run continues the one in the folder.

        Raises:
            OSError: the folder cannot be made or written.
            DataError: another run holds the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with file_lock(self.path / ".lock", f"run folder {self.path}", 0.0):
            self._set_aside(_DESCRIPTIONS if resume else (*_DESCRIPTIONS, *_RESULTS))
            (self.path / "logs").mkdir(exist_ok=True)
            (self.path / "config.yaml").write_text(resolved, encoding="utf-8")
            text = json.dumps(environment(), indent=2)
            (self.path / "environment.json").write_text(text + "\n", encoding="utf-8")
            yield

    def _set_aside(self, names: Sequence[str]) -> None:
        found = [name for name in names if (self.path / name).exists()]
        if not found:
            return
        number = 1
        while (self.path / f"previous-{number}").exists():
            number += 1
        target = self.path / f"previous-{number}"
        target.mkdir()
        for name in found:
            shutil.move(str(self.path / name), str(target / name))

    def log_path(self, rank: int) -> Path:
        """Where Megatron's own output of a rank goes when the console is kept quiet."""
        return self.path / "logs" / f"rank{rank}.log"
