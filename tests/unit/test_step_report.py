"""``bench step`` without a trainer: who has which step, and what the times say."""

from pathlib import Path
from typing import Any

import pytest

from megatron_taco.cli import main
from megatron_taco.config import load
from megatron_taco.lab import step_config, step_report
from megatron_taco.lab.step_arms import AXES, BOUNDARIES, COMPRESSORS, Layout, arms_of, configs
from megatron_taco.lab.step_schedule import PLAIN, SILENT, schedule

STEP_S = {PLAIN: 1.0, "e4m3": 0.625, "int4": 0.5, SILENT: 0.25}
RAW = 1000
WIRE = {PLAIN: 1000, "e4m3": 500, "int4": 250, SILENT: 0}


def _arms(times: dict[str, float] = STEP_S, drift: float = 0.0, **values: Any) -> Any:
    plan = schedule(["e4m3", "int4", SILENT], cycles=3, settle=1, steps=2)
    turns = plan.by_step()
    seconds = [times[t.arm] * (1 + drift * i) for i, t in enumerate(turns)]
    for i in range(1, len(turns)):
        if turns[i] is not turns[i - 1]:
            seconds[i] += 100  # the step after a change of arm does not count
    columns = {
        "raw": [0 if t.arm == SILENT else RAW for t in turns],
        "wire": [WIRE[t.arm] for t in turns],
        "calls": [0 if t.arm == SILENT else 34 for t in turns],
        "compressed": [32 if t.arm in ("e4m3", "int4") else 0 for t in turns],
        "peak_bytes": [i for i, _ in enumerate(turns)],
    }
    return step_report.arms(plan, seconds=seconds, **columns, rate=values.get("rate"))


def test_every_turn_lies_between_plain_ones() -> None:
    plan = schedule(["e4m3", "int4", SILENT], cycles=2, settle=1, steps=2)
    cycle = [PLAIN, "e4m3", "int4", SILENT]
    warm_up = ["e4m3", "int4", SILENT, PLAIN]
    assert [t.arm for t in plan.turns] == [*warm_up, *cycle, *cycle, PLAIN]
    assert [t.cycle for t in plan.turns] == [-1] * 4 + [0] * 4 + [1] * 4 + [2]
    assert plan.length == len(plan.by_step()) == 4 * 2 + 9 * 3
    counted = plan.counted()
    assert [turn.arm for turn, _ in counted] == [*cycle, *cycle, PLAIN]
    by_step = plan.by_step()
    for turn, steps in counted:
        assert len(steps) == 2
        assert all(by_step[step] is turn for step in [steps[0] - 1, *steps])


def test_without_formats_there_are_plain_steps_alone() -> None:
    assert {t.arm for t in schedule([], cycles=3, settle=0, steps=1).turns} == {PLAIN}


def test_ratios_and_limit() -> None:
    """f = 0.75, k = 2 and 4: at most 1.6 and 2.29 times as fast; the settling steps are left out.

    The bytes of a link of 8000 bit/s take 0.5 s.
    """
    arms, exposed = _arms(rate=8000)
    assert exposed == [0.75] * 3
    found = {arm.arm: arm for arm in arms}
    assert list(found) == [PLAIN, "e4m3", "int4", SILENT]
    assert found["e4m3"].ratios == [1.6] * 3
    assert found["e4m3"].limit == pytest.approx(1 / (0.25 + 0.75 / 2))
    assert found["e4m3"].share == pytest.approx(1.0)
    assert found["int4"].limit == pytest.approx(1 / (0.25 + 0.75 / 4))
    assert found["int4"].share == pytest.approx(2.0 / (1 / (0.25 + 0.75 / 4)))
    assert (found[PLAIN].limit, found[SILENT].limit) == (None, None)
    assert found["e4m3"].link_s == pytest.approx(0.5)
    assert (found["e4m3"].calls, found["e4m3"].compressed) == (34, 32)
    assert len(found[PLAIN].step_s) == 4 * 2
    assert found["int4"].step_s == [0.5] * 6


def test_what_drifts_does_not_count() -> None:
    """The last step is 4.5% slower than the first of the same arm; the ratios are off by 0.3%."""
    for steady, drifting in zip(_arms()[0], _arms(drift=0.001)[0], strict=True):
        assert drifting.ratio == pytest.approx(steady.ratio, rel=0.003)


def test_noise_cannot_make_the_share_leave_its_range() -> None:
    assert step_report.limit(-0.1, 1000, 500) == 1.0
    assert step_report.limit(1.2, 1000, 500) == pytest.approx(2.0)


def test_the_table() -> None:
    arms, exposed = _arms()
    report = {
        "about": {},
        "arms": [arm.record() for arm in arms],
        "exposed": exposed,
        "other_uncompressed": {"transformer_engine": [0.8, 0.8]},
    }
    head, rows = step_report.table(report)
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert cells["e4m3"]["plain / arm"] == "1.60 (1.60-1.60)"
    assert cells["e4m3"]["limit"] == "1.60"
    assert cells["e4m3"]["share"] == "100.0%"
    assert cells["int4"]["raw / wire"] == "4.00"
    assert cells["plain"]["ms a step"] == "1000 (1000-1000)"
    assert cells["plain, transformer_engine"]["ms a step"] == "800.0 (800.0-800.0)"
    exposed_line, other_line = step_report.notes(report)
    assert "f = 0.750 (0.750 - 0.750)" in exposed_line
    assert "transformer_engine, in a run of its own: 1.25 times as fast" in other_line
    assert other_line.endswith("times as fast as that: e4m3 1.28, int4 1.60.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2", "--rate", "1Gbit"], "--ranks is for loopback"),
        ([], "no ranks: start it with torchrun"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_user_of_torchrun_is_told_that_other_configurations_need_other_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "step", "--uncompressed", "megatron"]) == 2
    assert "--uncompressed needs a run for each" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--axis", "pipeline", "megatron.pipeline_model_parallel_size=1"],
            "--axis pipeline: nothing is sent on this axis with parallel sizes tensor 1, "
            "pipeline 1, data 2; set megatron.pipeline_model_parallel_size to 2 or more",
        ),
        (
            ["--axis", "data", "megatron.tensor_model_parallel_size=2"],
            "--axis data: nothing is sent on this axis",
        ),
        (["--axis", "all"], "allowed: a multiple of 4"),
        (
            ["--axis", "pipeline", "megatron.overlap_grad_reduce=true"],
            "set megatron.overlap_grad_reduce=false",
        ),
        (
            [
                *("--axis", "data", "--compressors", "powersgd"),
                *("megatron.bf16=false", "megatron.fp16=true"),
            ],
            "true does not go with compression.data_parallel.gradients.compressor: powersgd",
        ),
    ],
)
def test_layouts_in_which_there_is_nothing_to_measure(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "step", *words]) == 2
    found = capsys.readouterr().err.strip()
    assert message in found
    assert "\n" not in found


@pytest.mark.parametrize("gpu", [False, True])
def test_own_configurations_are_possible_on_their_axes(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    for axis in AXES:
        path = step_config.write(tmp_path, axis, gpu=gpu)
        config = load(path)
        layout = Layout.of(config, 8)
        axes = layout.axes(axis)
        assert axes == (("tensor", "pipeline", "data") if axis == "all" else (axis,))
        assert layout.tensor * layout.pipeline * layout.data == 8
        # That of subspaces refuses learned positions, which both models have.
        boundaries = [name for name in BOUNDARIES if not name.startswith("subspace")]
        named = {"formats": ["e4m3"], "boundaries": boundaries, "compressors": COMPRESSORS}
        arms = arms_of(axis, axes, **named)
        found = configs(path, [], config, arms, axes)
        if axis == "pipeline":
            assert list(found.pipeline) == boundaries
            mapl = found.pipeline["mapl"].compression.pipeline_parallel
            assert mapl.resolved_rank() == (256 if gpu else 16)
        if axis == "data":
            assert set(found.data) == {*COMPRESSORS, PLAIN}


def test_what_a_boundary_costs_is_said() -> None:
    """f = 0.75: k = 4 from the messages, 3.2 with the exchange, whose limits are 2.29 and 2.06."""
    arms, exposed = _arms()
    cost = {"micro_batch_s": 0.001, "step_s": 0.002, "compute_s": 0.1, "share": 0.0105}
    work = [
        {"arm": "int4", **cost, "exchange_bytes": 62.5, "exchange_s": 0.02},
        {"arm": "e4m3", **cost, "exchange_bytes": 0, "exchange_s": 0.0},
    ]
    report = {
        "about": {"axis": "pipeline"},
        "arms": [arm.record() for arm in arms],
        "exposed": exposed,
        "work": work,
        "other_uncompressed": {},
    }
    _, silent, own, exchange, other = step_report.notes(report)
    assert "stages still wait" in silent
    assert "int4, a stage by itself: 1 ms a micro-batch and 2 ms a step" in own
    assert "1.05% of the stage's 100 ms" in own
    assert "20 ms by itself; with its bytes counted the limit is 2.06, of which int4" in exchange
    assert "reaches 96.9%" in exchange
    assert other.startswith("e4m3, a stage by itself")


def test_against_fp32_messages_a_step_gains_more() -> None:
    """f = 0.75: FP32 costs 1 - f + 2 f = 1.75 of a plain step, E4M3 0.625, so the limit is 2.8."""
    arms, exposed = _arms()
    wide = {"arm": "fp32", "raw": RAW, "wire": 2 * RAW, "ratio": 0.5, "step_s": [2.0]}
    wide["limit"] = step_report.limit(0.75, RAW, 2 * RAW)
    report = {
        "about": {"axis": "tensor"},
        "arms": [*(arm.record() for arm in arms), wide],
        "exposed": exposed,
        "other_uncompressed": {},
    }
    _, told = step_report.notes(report)
    assert told == (
        "Times as fast as with FP32 tensor-parallel messages, uncompressed: e4m3 3.20 (limit "
        "2.80), int4 4.00 (limit 4.00)."
    )


def test_fp32_messages_are_an_arm_of_their_own_beside_all_axes() -> None:
    arms = arms_of(
        "all",
        ("tensor", "data"),
        formats=["fp32", "int8"],
        boundaries=BOUNDARIES,
        compressors=COMPRESSORS,
    )
    assert [arm.name for arm in arms] == ["all", "tensor", "data", "fp32", "silent"]
    assert arms[0].tensor == arms[1].tensor == "int8"
    assert (arms[3].tensor, arms[3].data) == ("fp32", PLAIN)
