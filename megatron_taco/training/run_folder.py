"""The run folder: resolved configuration, environment, metrics, logs, checkpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "logs")
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


class RunFolder:
    """``<dir>/<name>``; rank 0 makes it, every rank may log into it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    def create(self, resolved: str, *, resume: bool) -> None:
        """Make the folder and write what describes the run; rank 0 calls it.

        An earlier run's files in the same folder are kept: moved to ``previous-<n>``, unless this
        run resumes, which appends to its metrics.

        Args:
            resolved: the resolved configuration as YAML.
            resume: whether this run continues the one in the folder.
        """
        if self.metrics.exists() and not resume:
            self._set_aside()
        (self.path / "logs").mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(resolved, encoding="utf-8")
        text = json.dumps(environment(), indent=2)
        (self.path / "environment.json").write_text(text + "\n", encoding="utf-8")

    def _set_aside(self) -> None:
        number = 1
        while (self.path / f"previous-{number}").exists():
            number += 1
        target = self.path / f"previous-{number}"
        target.mkdir()
        for name in _FILES:
            if (self.path / name).exists():
                shutil.move(str(self.path / name), str(target / name))

    def log_path(self, rank: int) -> Path:
        """Where Megatron's own output of a rank goes when the console is kept quiet."""
        return self.path / "logs" / f"rank{rank}.log"
