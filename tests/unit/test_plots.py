"""Plots of reports: what is drawn is what the report says."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.cli import main
from megatron_taco.lab import plots

ABOUT = {"ranks": 2, "device": "CPU", "model": "gpt-tiny"}
PLACE = {
    "link": {"rate": 10_000_000_000, "burst": 256_000, "mtu": 9000, "delay_us": 0},
    "hosts": 2,
    "ranks_per_host": 1,
    "shared_gpu": True,
}
STEP: dict[str, Any] = {
    "benchmark": "step",
    "about": ABOUT,
    "place": PLACE,
    "arms": [
        {"arm": "plain", "limit": None},
        {"arm": "e4m3", "limit": 1.71, "ratio": 1.68, "ratios": [1.6, 1.7], "share_of_limit": 0.98},
    ],
}
COLLECTIVES: dict[str, Any] = {
    "benchmark": "collectives",
    "about": ABOUT,
    "place": None,
    "rows": [
        {
            "operation": "all_reduce",
            "algorithm": algorithm,
            "format": format,
            "rotation": rotation,
            "scales": "dual",
            "extra": None,
            "size": size << 20,
            "raw": 100,
            "wire": 50,
            "ratio": 1.85,
            "plain_s": [1.8, 1.9],
            "ours_s": [1.0, 1.0],
        }
        for size in (1, 16)
        for algorithm in ("one_shot", "two_shot")
        for format, rotation in (("e4m3", "hadamard"), ("e4m3", "none"), ("int6", "hadamard"))
    ],
}
KERNELS: dict[str, Any] = {
    "benchmark": "kernels",
    "gpu": "NVIDIA H200",
    "elements": 64 << 20,
    "rows": [
        {
            "name": name,
            "format": "e4m3",
            "share": share,
            "low": 3.0,
            "high": 4.0,
            "gigabytes_per_second": 3.5,
        }
        for name, share in (("copy", 1.0), ("encode", 0.87), ("reduce_encode of 2", 0.93))
    ],
}


LOSSES: dict[str, Any] = {
    "benchmark": "losses",
    "about": {"model": "small"},
    "layouts": {
        "tp2": {
            "title": "TP 2",
            "runs": {
                "uncompressed": {"loss": [3.0 - i / 50 for i in range(40)]},
                "int4": {"loss": [3.1 - i / 50 for i in range(40)]},
            },
        }
    },
}


def _texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("report", "texts"),
    [
        (STEP, ["1.68", "98% of the limit", "times as fast as the plain step"]),
        (COLLECTIVES, ["1.85", "16 MiB", "two-shot", "INT6", "E4M3 unrotated"]),
        (KERNELS, ["0.87", "0.93", "reduce encode of 2"]),
        (LOSSES, ["small, TP 2", "INT4", "mean of 20 steps"]),
    ],
    ids=["step", "collectives", "kernels", "losses"],
)
def test_an_svg_says_what_the_report_says(
    report: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "plot.svg"
    plots.draw(report, path)
    found = _texts(path)
    for text in texts:
        assert text in found, found
    assert path.stat().st_size < 100_000
    again = tmp_path / "again.svg"
    plots.draw(report, again)
    assert again.read_bytes() == path.read_bytes()


def test_a_png(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plots.draw(STEP, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 100_000


def test_the_place_is_told() -> None:
    assert plots.where(STEP) == "2 ranks, CPU shared by all ranks, 10Gbit/s"
    host_memory = {"about": {**ABOUT, "nccl_p2p_disable": "1"}, "place": None}
    assert plots.where(host_memory) == "2 ranks, CPU, no emulated link, NCCL_P2P_DISABLE=1"


def test_an_unknown_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'links'; allowed: kernels, collectives, step, losses"):
        plots.draw({"benchmark": "links"}, tmp_path / "plot.svg")


@pytest.mark.parametrize("benchmark", ["collectives", "step"])
def test_a_plot_that_cannot_be_is_refused_before_anything_runs(
    benchmark: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", benchmark, "--ranks", "2", "--cpu", "--plot", "steps.pdf"])
    assert "'steps.pdf' is no plot file; allowed: names that end with .png" in _last_line(capsys)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", benchmark, "--ranks", "2", "--cpu", "--plot", "steps.svg"])
    line = _last_line(capsys)
    assert "plots need matplotlib" in line
    assert "pip install 'megatron-taco[lab]'" in line


def _last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]
