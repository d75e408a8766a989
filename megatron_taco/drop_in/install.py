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
) -> DropIn:
    """Compress what Megatron sends; see :func:`megatron_taco.install`."""
    if device not in (None, "cpu"):
        raise ConfigError(
            f"install(device={device!r}): allowed: None, which changes nothing, 'cpu'"
        )
    settings = config if isinstance(config, Settings) else load_settings(config)
    return DropIn(
        settings,
        run_dir=None if run_dir is None else Path(run_dir),
        device="cpu" if device == "cpu" else None,
    ).install()
