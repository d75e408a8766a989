"""Lists of benchmarks that are run once, and the page made of their JSON."""

import argparse
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.cli.bench import BENCHMARKS
from megatron_taco.lab import loss_report
from megatron_taco.lab.results import Part, main
from tests.unit.test_plots import COLLECTIVES, KERNELS, STEP

ABOUT = {
    **STEP["about"],
    "versions": {"torch": "2.11.0", "megatron-core": "0.19.2"},
    "cuda": None,
    "python": "3.12.3",
    "block": 256,
    "scales": "dual",
    **dict.fromkeys(("num_layers", "hidden_size", "seq_length", "micro_batch_size"), 8),
    **dict.fromkeys(("global_batch_size", "cycles", "steps", "settle"), 1),
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": None,
    "sequence_parallel": True,
}
CHECK = {"pattern": "one way", "share": 1.013}
ARM = {"step_s": [1.0, 1.1], "raw": 100, "wire": 50, "link_s": 0.25, "peak_bytes": 3 << 30}
REPORTS: dict[str, dict[str, Any]] = {
    "step": {
        **STEP,
        "about": ABOUT,
        "link_check": [CHECK],
        "exposed": [0.9],
        "other_uncompressed": {},
        "arms": [{**ARM, "median_s": 1.05, "ratios": [1.0], **arm} for arm in STEP["arms"]],
    },
    "collectives": {
        **COLLECTIVES,
        "about": ABOUT,
        "link_check": [],
        "usable": False,
        "rows": [{**row, "error": 0.026} for row in COLLECTIVES["rows"]],
    },
    "kernels": {
        **KERNELS,
        **{"torch": "2.11.0", "triton": "3.6.0", "block": 256, "scales": "dual"},
        **{"replays": 25, "calls_a_graph": 8},
        "rows": [
            {**row, "microseconds": 60.7, "host_microseconds": 12.0} for row in KERNELS["rows"]
        ],
    },
}
WRITE = """
import pathlib, sys
report, count = sys.argv[1], pathlib.Path(sys.argv[2])
count.write_text(count.read_text() + "." if count.exists() else ".")
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(report)
"""


def _part(name: str, tmp_path: Path, **values: Any) -> Part:
    text = json.dumps(REPORTS[name])
    command = ("-c", WRITE, text, str(tmp_path / f"{name}.count"))
    return Part(name=name, title=f"About {name}", command=command, **values)


def _runs(name: str, tmp_path: Path) -> int:
    file = tmp_path / f"{name}.count"
    return len(file.read_text()) if file.exists() else 0


def test_parts_run_once_and_make_a_page(tmp_path: Path) -> None:
    parts = [_part(name, tmp_path, aim=f"aim of {name}") for name in REPORTS]
    page = tmp_path / "results" / "fast-links.md"
    words = ["--commit", "abc1234"]
    assert main(parts, page, "test", [*words, "--parts", "step"]) == 0
    assert [_runs(name, tmp_path) for name in REPORTS] == [1, 0, 0]
    assert main(parts, page, "test", words) == 0
    assert [_runs(name, tmp_path) for name in REPORTS] == [1, 1, 1]
    assert main(parts, page, "test", [*words, "--again", "--parts", "step"]) == 0
    assert [_runs(name, tmp_path) for name in REPORTS] == [2, 1, 1]

    text = page.read_text()
    assert text.startswith("# Fast links\n")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [f"About {name}" for name in REPORTS]
    for name in REPORTS:
        assert f"![About {name}](fast-links/{name}.svg)" in text
        assert (page.parent / "fast-links" / f"{name}.svg").stat().st_size > 1000
        assert f"Aim: aim of {name}." in text
    assert text.count("commit abc1234.") == 3
    assert (
        "| e4m3 | 1050 (1000-1100) | 1.65 (1.60-1.70) | 1.71 | 98.0% | 2.00 | 250 | 3.00 |" in text
    )
    assert "tensor parallel 2 with sequence parallelism" in text
    assert "| all_reduce | two_shot | int6 | 16 |" in text
    assert "| all_reduce | one_shot | e4m3 unrotated | 1 |" in text
    assert "| encode | e4m3 | 60.7 | 4 | 3 .. 4 | 87.0% |" in text
    assert text.count("**Unusable: the link was faster than it says.**") == 1
    assert "Link check, one way: 1.013 × bytes / rate." in text


def test_what_is_written_by_hand_stays(tmp_path: Path) -> None:
    parts = [_part(name, tmp_path) for name in ("step", "kernels")]
    page = tmp_path / "page.md"
    assert main(parts, page, "test", ["--commit", "one"]) == 0
    section = "<!-- measured: kernels -->"
    page.write_text(
        page.read_text().replace(section, f"A remark on the step.\n\n{section}") + "An end.\n"
    )
    assert main(parts, page, "test", ["--commit", "two", "--again", "--parts", "step"]) == 0
    text = page.read_text()
    assert text.index("commit two.") < text.index("A remark on the step.") < text.index(section)
    assert text.index(section) < text.index("commit one.") < text.index("An end.")
    assert text.count("## About step") == text.count("## About kernels") == 1


def test_a_part_that_fails_leaves_nothing_and_the_others_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Part(name="bad", title="Bad", command=("-c", "import sys; sys.exit(3)"))
    parts = [bad, _part("step", tmp_path)]
    page = tmp_path / "page.md"
    assert main(parts, page, "test", ["--commit", "x"]) == 3
    assert "bad failed with exit code 3" in capfd.readouterr().err
    assert sorted(p.name for p in (tmp_path / "page").iterdir()) == ["step.json", "step.svg"]
    assert "Bad" not in page.read_text()


def test_the_environment_of_a_part_is_shown_and_set(tmp_path: Path) -> None:
    code = f"import os\nassert os.environ['TRANSPORT'] == '1'\n{WRITE}"
    part = _part("step", tmp_path, environment={"TRANSPORT": "1"})
    part = Part(
        name="step",
        title="Step",
        command=(part.command[0], code, *part.command[2:]),
        environment=part.environment,
    )
    assert part.shown.startswith("TRANSPORT=1 python -c ")
    assert main([part], tmp_path / "page.md", "test", ["--commit", "x"]) == 0
    command = ("-m", "megatron_taco.cli", "bench", "step", "--ranks", "2")
    shown = Part(name="n", title="T", command=command).shown
    assert shown == "megatron-taco bench step --ranks 2"


@pytest.mark.parametrize("name", ["one_gpu_speed"])
def test_the_lists_ask_for_what_the_benchmarks_take(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of a list is parsed as its benchmark parses it."""
    folder = Path(__file__).parent.parent.parent / "scripts" / "reproduce"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    parts = importlib.import_module(name).PARTS
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.command[:3] != ("-m", "megatron_taco.cli", "bench"):
            module = part.command[0] == "-m" and importlib.util.find_spec(part.command[1])
            assert module or Path(part.command[0]).is_file()
            continue
        benchmark, *words = part.command[3:]
        parser = argparse.ArgumentParser()
        importlib.import_module(BENCHMARKS[benchmark][0]).add_arguments(parser)
        parser.parse_args([*words, "--json", "out.json"])


def test_losses_side_by_side() -> None:
    def lines(offset: float) -> list[dict[str, Any]]:
        steps = [
            {"event": "step", "loss": 3 + offset - i / 100, "step_ms": 10.0} for i in range(200)
        ]
        validation = [{"event": "validation", "loss": loss} for loss in (2.0, 1.5 + offset)]
        flow = {
            **{"calls": 10, "compressed": 8, "raw_bytes": 2 << 20, "wire_bytes": 1 << 20},
            **{"error": 0.026, "nonfinite_blocks": 0},
        }
        return [*steps, *validation, {"event": "end", "flows": {"tp.forward all_reduce": flow}}]

    records = {
        "uncompressed": loss_report.run_record(lines(0.0), 20.0),
        "int4": loss_report.run_record(lines(0.01), 21.0),
    }
    records["int4"]["loss"][3] = None
    head, rows = loss_report.table(records, times=False)
    assert head == ["", "uncompressed", "int4"]
    assert rows == [
        ["loss, mean of the last 20 steps", "1.1050", "1.1150 (+0.90%)"],
        ["validation loss", "1.5000", "1.5100 (+0.67%)"],
        ["every loss finite", "yes", "no"],
    ]
    timed = [row[0] for row in loss_report.table(records, times=True)[1]]
    assert "ms a step, median" in timed
    head, rows = loss_report.flow_table(records["int4"])
    assert rows == [["tp.forward all_reduce", "10", "8", "2", "1", "0.500", "2.60%", "0"]]
