"""Does something with a module as soon as it is there, whoever imports it and whenever.

A script may change ``sys.path`` before it imports Megatron, and may import by value: so nothing is
imported ahead of it, and what is to be replaced is replaced before the importing statement goes on.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, when a module has been executed; at once where it has been.

    Args:
        module: dotted name of the module.
        call: what to call.  What it raises comes out of the import statement.
    """

    def __init__(self, module: str, call: Callable[[], None]) -> None:
        self._module = module
        self._call = call
        self._searching = False

    def install(self) -> AfterImport:
        """Wait for the module, or call at once."""
        if self._module in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)
        return self

    def undo(self) -> None:
        """Wait no longer; nothing happens if the module has been imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module as all other finders do."""
        if fullname != self._module or self._searching:
            return None
        self._searching = True
        try:
            spec = _found_by_others(self, fullname, path, target)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is the module's from now on, and only that
            execute(module)
            self.undo()
            self._call()

        loader.exec_module = exec_module


def _found_by_others(
    finder: AfterImport, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for other in sys.meta_path:
        if other is not finder and hasattr(other, "find_spec"):
            spec = other.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None
