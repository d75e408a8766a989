"""The argument ``--plot FILE``, checked before anything is measured. Imports no matplotlib."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".png", ".svg")


def plot_file(text: str) -> Path:
    """Parses ``--plot``.

    Raises:
        argparse.ArgumentTypeError: The suffix is none of ``SUFFIXES``, or matplotlib is missing.
    """
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no plot file; allowed: names that end with {' or '.join(SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "plots need matplotlib, which is not installed: pip install 'megatron-taco[lab]'"
        )
    return path
