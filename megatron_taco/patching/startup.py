"""Start-up repairs that Megatron itself needs, whether or not anything is compressed.

``initialize_megatron`` always builds the data sets' C++ helpers with ``make``.  A wheel brings them
prebuilt and has no Makefile, so that ``make`` fails and Megatron exits: there the build is skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_taco.patching.registry import Registry

OWNER = "start-up repair"


def needs_prebuilt_helpers() -> bool:
    """Whether megatron-core brings prebuilt helpers and no Makefile to build them with."""
    spec = importlib.util.find_spec("megatron.core.datasets")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(next(iter(spec.submodule_search_locations)))
    return not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*.so"))


def _skip_build(original: Callable[..., Any], hit: Callable[[], None]) -> Callable[..., Any]:
    def compile_helpers() -> None:
        hit()

    return compile_helpers


def repair(registry: Registry) -> None:
    """Claim the repairs this installation needs; nothing changes until the registry is applied."""
    if needs_prebuilt_helpers():
        registry.claim("startup.compile_helpers", OWNER, _skip_build)
