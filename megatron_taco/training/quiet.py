"""Keeps Megatron's own output off the console: it goes to a log file of each rank."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import IO

_LOGGERS = ("py.warnings", "megatron", "megatron_taco", "torch.utils.cpp_extension")


@contextlib.contextmanager
def quiet(stream: IO[str]) -> Iterator[None]:
    """Send standard output, warnings and the log records of Megatron to ``stream``."""
    handler = logging.StreamHandler(stream)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with contextlib.redirect_stdout(stream), warnings.catch_warnings():
        for logger in loggers:
            logger.addHandler(handler)
            logger.propagate = False
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for logger in loggers:
                logger.propagate = True
                logger.removeHandler(handler)
