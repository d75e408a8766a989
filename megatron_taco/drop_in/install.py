"""The one call that brings compression into a script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_taco.config import ConfigError, Settings, load_settings
from megatron_taco.drop_in.hooks import DropIn


def install(
    config: str | Path | Mapping[str, Any] | Settings,
    *,
    run_dir: str | Path | None = None,
    device: str | None = None,
    exit_on_mistake: bool = False,
) -> DropIn:
    """Compress what Megatron sends; see :func:`megatron_taco.install`.

    Args:
        config: as there, or settings that are loaded already.
        run_dir: as there.
        device: as there.
        exit_on_mistake: end the process after one line where Megatron's ``pretrain`` would let our
            refusal through, for callers that do not catch it.
    """
    if device not in (None, "cpu"):
        raise ConfigError(f"install(device={device!r}): allowed: None and 'cpu'")
    settings = config if isinstance(config, Settings) else load_settings(config)
    return DropIn(
        settings,
        run_dir=None if run_dir is None else Path(run_dir),
        device="cpu" if device == "cpu" else None,
        exit_on_mistake=exit_on_mistake,
    ).install()
