"""Fixtures and markers that all tests share."""

import os
from collections.abc import Iterator

import pytest

from tests.ranks import RankRunner


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; run by hand, not by default")


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Undoes what a test does to the environment: Megatron's configuration sets NVTE_* there."""
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankRunner]:
    """Runs a module-level function on several gloo ranks: see :class:`tests.ranks.RankRunner`."""
    runner = RankRunner()
    yield runner
    runner.close()
