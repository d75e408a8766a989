"""Lists of benchmarks that are run once, and the page made of their JSON."""

import json
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.lab import loss_report
from megatron_taco.lab.part_order import Nodes
from megatron_taco.lab.places import free_port
from megatron_taco.lab.results import Part, main
from megatron_taco.lab.results_page import Section
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
    assert "== not done:\n==   bad: exit code 3\n" in capfd.readouterr().err
    assert sorted(p.name for p in (tmp_path / "page").iterdir()) == ["step.json", "step.svg"]
    assert "Bad" not in page.read_text()


def test_too_few_gpus_are_one_line_and_the_others_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    parts = [_part("step", tmp_path, gpus=4), _part("kernels", tmp_path, gpus=2)]
    page = tmp_path / "page.md"
    assert main(parts, page, "test", ["--commit", "x"]) == 2
    captured = capfd.readouterr()
    assert (
        captured.err == "== not done:\n==   step: needs 4 GPUs, found 2; --small runs it on CPUs\n"
    )
    assert "1 of 2 parts are there" in captured.out
    assert [_runs(name, tmp_path) for name in ("step", "kernels")] == [0, 1]


def test_the_small_form_has_a_page_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = _part("step", tmp_path, aim="a GPU's", gpus=4)
    small = replace(step, command=("-c", "raise SystemExit(1)"), small=step.command)
    none = _part("kernels", tmp_path, gpus=1, no_small="kernels need a GPU")
    page = tmp_path / "many.md"
    assert main([small, none], page, "test", ["--small", "--commit", "x"], heading=HEADING) == 0
    assert "==   kernels: no small form: kernels need a GPU" in capfd.readouterr().err
    assert not page.exists()
    text = (tmp_path / "many-small.md").read_text()
    assert text.startswith("# Many, in small form\n\nWhat is measured.\n\nCPU ranks over gloo")
    assert "Aim" not in text
    assert "](" not in text  # no plot: times are no result
    assert [p.name for p in (tmp_path / "many-small").iterdir()] == ["step.json"]


def test_parts_that_were_not_started_in_time_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [_part("step", tmp_path)]
    assert main(parts, tmp_path / "page.md", "test", ["--seconds", "0"]) == 0
    assert "==   step: not started" in capfd.readouterr().err
    assert _runs("step", tmp_path) == 0


HEADING = "# Many\n\nWhat is measured."
INTERRUPTED = """
import sys
from pathlib import Path
from megatron_taco.lab.results import Part, main
from megatron_taco.lab.results_page import Section
folder = Path(sys.argv[1])
parts = [
    Part(name="step", title="Step", command=("-c", *sys.argv[2:5])),
    Part(name="slow", title="Slow", command=("-c", "import time; time.sleep(600)")),
    Part(name="later", title="Later", command=("-c", *sys.argv[2:5])),
]
sys.exit(main(parts, folder / "page.md", "test", ["--commit", "x"]))
"""


def test_an_interrupted_list_keeps_what_is_complete(tmp_path: Path) -> None:
    part = _part("step", tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), *part.command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("== slow"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "==   slow: interrupted by SIGINT" in err
    assert "Traceback" not in err
    found = sorted(p.name for p in (tmp_path / "page").iterdir())
    assert found == ["step.json", "step.svg"]
    assert "## Step" in (tmp_path / "page.md").read_text()
    assert _runs("step", tmp_path) == 1  # nothing was started after it


def test_several_machines_run_what_the_first_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is there on the first is run on none; a part that fails on one ends on the other."""
    port = free_port()
    codes: list[int] = []

    def machine(rank: int) -> int:
        folder = tmp_path / str(rank)
        folder.mkdir()
        parts = [_part(name, folder) for name in ("step", "kernels", "collectives")]
        fails = ("-c", "import sys; sys.exit(3)")
        parts.insert(1, Part(name="bad", title="Bad", command=fails))
        parts = [replace(part, small=part.command) for part in parts]  # no plots, which take time
        if rank == 0:
            (folder / "page-small").mkdir()
            report = {**REPORTS["step"], "run": {"command": "c", "date": "d", "commit": "e"}}
            (folder / "page-small" / "step.json").write_text(json.dumps(report))

        def meet() -> Nodes:
            return Nodes(count=2, rank=rank, address="127.0.0.1", port=port)

        return main(parts, folder / "page.md", "test", ["--small", "--commit", "x"], meet=meet)

    other = threading.Thread(target=lambda: codes.append(machine(1)))
    other.start()
    assert machine(0) == 3
    other.join(timeout=60)
    assert codes == [3]
    for rank in range(2):
        names = ("step", "kernels", "collectives")
        assert [_runs(name, tmp_path / str(rank)) for name in names] == [0, 1, 1]
    assert not (tmp_path / "1" / "page-small").exists()
    assert len(list((tmp_path / "0" / "page-small").glob("*.json"))) == 3


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


def test_a_table_stands_on_a_page_without_a_plot(tmp_path: Path) -> None:
    tables = [{"title": "Runs", "head": ["run", "loss"], "rows": [["on", "3.1"]], "notes": ["Ok."]}]
    report = {
        "benchmark": "table",
        "about": {"text": "Where it ran."},
        "tables": tables,
        "run": {"command": "c", "date": "d", "commit": "e"},
    }
    section = Section(name="drop-in", title="A script", aim="", report=report, folder=tmp_path)
    text = "\n".join(section.lines())
    assert text == (
        "## A script\n\n`c`, d, commit e.\n\nWhere it ran.\n\n### Runs\n\n"
        "| run | loss |\n| --- | --- |\n| on | 3.1 |\n\nOk."
    )
    assert not list(tmp_path.iterdir())
