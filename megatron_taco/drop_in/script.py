"""Runs a Python script as the main program of this process, as ``python script.py`` would.

``runpy`` puts its module back when the script ends and, meanwhile, what the script defines is not
found where pickle looks for it.  Here the script's module is ``__main__`` for the rest of the
process: objects of its classes can be saved, and processes that ``multiprocessing`` spawns import
the script itself (under another name), not this package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_taco.config.errors import ConfigError


def check_script(path: str) -> None:
    """Refuse what is no script.

    Raises:
        ConfigError: naming the path and what was found there.
    """
    if not Path(path).is_file():
        found = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ConfigError(f"command line: {path}: {found}; give the path of a training script")


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Execute a script; what it raises, ``SystemExit`` included, is passed on.

    ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` become the script's and stay so.

    Args:
        path: the script.
        arguments: its command line.
    """
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__spec__ = None
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    exec(code, module.__dict__)
