"""The Triton kernels give the bytes of the torch compressor, run by Triton's interpreter."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_taco.compressors import Taco

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize("share", ["0/13", "6/13", "any"])
def test_kernels_give_the_bytes_of_torch(share: str) -> None:
    """Two shares have what trainers use, the third is another each time."""
    script = str(ROOT / "tests" / "unit" / "interpreted_kernels.py")
    seed = time.time_ns() % 10**6
    share = share.replace("any", f"{seed % 13}/13")
    run = python(script, str(seed), share, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^[45] arms checked, 0 differ$", run.stdout, re.MULTILINE), run.stdout


def test_cpu_tensors_stay_on_torch_and_triton_is_not_imported() -> None:
    code = (
        "import sys, torch\n"
        "from megatron_taco.compressors import Taco\n"
        "taco = Taco(block=32)\n"
        "taco.decode(taco.encode(torch.randn(100)), (100,), torch.float32)\n"
        "print('triton' in sys.modules, 'megatron_taco.kernels.launch' in sys.modules)"
    )
    run = python("-c", code, TRITON_INTERPRET="0")
    assert run.stdout.split() == ["False", "False"], run.stdout + run.stderr


def test_no_kernels_for_cpu_tensors_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not Taco().has_kernels(torch.device("cpu"))
    assert Taco().warm_up([(2, 1000)], [torch.float32], torch.device("cpu")) == []


def test_the_reference_is_the_same_compressor() -> None:
    taco = Taco("int6", 64, "none", "merged_bf16")
    x = torch.randn(2, 1000)
    assert torch.equal(taco.reference().encode_rows(x), taco.encode_rows(x))
    published = Taco(published_clips=True).reference()
    assert published.published_clips
    assert published.name == "taco"
