"""The Triton kernels of block integers give the bytes of torch, run by Triton's interpreter."""

import time
from pathlib import Path

import pytest
import torch

from megatron_taco.compressors.dispatch import group_kernels_on
from tests.unit.test_kernels import python


def test_kernels_give_the_bytes_of_torch() -> None:
    script = str(Path(__file__).parent / "interpreted_groups.py")
    run = python(script, str(time.time_ns() % 10**6), TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("nothing differs") == 4


def test_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert group_kernels_on(cpu, 4, 1) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert group_kernels_on(cpu, 6, 1) is None
    assert group_kernels_on(cpu, 4, 70_000) is None
