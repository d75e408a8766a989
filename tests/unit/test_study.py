"""Studies over several seeds: which differences mean something, and what is kept of a run."""

from pathlib import Path
from typing import Any

import pytest

from megatron_taco.lab import plots, study

PLAIN = {1: 3.00, 2: 3.10}


def test_a_difference_beyond_twice_the_spread_is_resolved() -> None:
    runs = {"plain": PLAIN, "worse": {1: 3.05, 2: 3.16}, "near": {1: 3.01, 2: 3.12}}
    worse = study.difference(runs, "worse", "plain")
    assert worse is not None
    assert worse.mean == pytest.approx(0.055)
    assert worse.share == pytest.approx(0.055 / 3.05)
    assert worse.spread == pytest.approx(0.01)  # of the pairs, not of the losses
    assert worse.resolved
    assert str(worse) == "+0.0550 (+1.80%)"
    near = study.difference(runs, "near", "plain")
    assert near is not None
    assert not near.resolved
    assert str(near) == "+0.0150 (+0.49%), unresolved"


def test_seeds_that_agree_by_chance_take_the_spread_of_the_others() -> None:
    noisy = {"a": {1: 3.00, 2: 3.20}, "b": {1: 3.05, 2: 3.20}, "c": {1: 3.02, 2: 3.06}}
    runs = {"plain": PLAIN, **noisy, "lucky": {1: 3.03, 2: 3.13}}
    lucky = study.difference(runs, "lucky", "plain")
    assert lucky is not None
    assert lucky.spread == pytest.approx(0.055)  # between those of b and c
    assert not lucky.resolved


def test_one_seed_resolves_nothing() -> None:
    found = study.difference({"plain": {1: 3.0}, "other": {1: 4.0}}, "other", "plain")
    assert found is not None
    assert not found.resolved
    assert str(found).endswith(", one seed")
    assert study.difference({"plain": {1: 3.0}, "other": {2: 4.0}}, "other", "plain") is None
    # The spread of others serves an arm of one seed.
    runs = {"plain": PLAIN, "two": {1: 3.01, 2: 3.12}, "one": {1: 3.5}}
    one = study.difference(runs, "one", "plain")
    assert one is not None
    assert one.resolved


def step(number: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"event": "step", "iteration": number, "loss": loss, "step_ms": 10.0 * number, **more}


def turned(error: float, repairs: int) -> dict[str, Any]:
    return {"boundaries": {"after_layer_2": {"orthonormality": error, "repairs": repairs}}}


def test_a_resumed_run_counts_each_step_once() -> None:
    lines = [
        step(1, 5.0, **turned(1e-6, 0)),
        step(2, 4.0, **turned(3e-6, 1)),
        step(3, 9.0, **turned(1e-6, 1)),  # lost: the checkpoint is of step 2
        {"event": "resume", "iteration": 2},
        step(3, 3.0, **turned(2e-6, 2)),
        {"event": "validation", "iteration": 3, "loss": 3.5},
        {"event": "projectors", "iteration": 3, "angles": {"after_layer_2": {"median": 4.0}}},
    ]
    record = study.run_record(lines)
    assert record["steps"] == [1, 2, 3]
    assert record["loss"] == [5.0, 4.0, 3.0]
    assert record["validation"] == [(3, 3.5)]
    assert record["step_ms"] == 20.0
    assert (record["orthonormality"], record["repairs"]) == (3e-6, 2)


def test_the_table_and_the_curves(tmp_path: Path) -> None:
    def run(last: float) -> dict[str, Any]:
        losses = [last + 1.0 / n for n in range(1, 41)]
        return {"loss": losses, "validation": [[20, last + 0.1], [40, last]]}

    records = {"plain": {1: run(3.0), 2: run(3.1)}, "ours": {1: run(3.05), 2: run(3.16)}}
    lines = study.table(records, {"bytes": {"ours": "512"}}, ("plain",))
    assert lines[0] == "| arm | bytes | seeds | validation loss | against plain |"
    assert lines[2:] == [
        "| plain |  | 2 | 3.0500 |  |",
        "| ours | 512 | 2 | 3.1050 | +0.0550 (+1.80%) |",
    ]
    arms = study.curves(records, "plain")
    assert arms["ours"]["validation"] == [(20, pytest.approx(3.205)), (40, pytest.approx(3.105))]
    report = {"benchmark": "study", "base": "plain", "title": "Two arms", "arms": arms}
    plots.draw(report, tmp_path / "losses.svg")
    text = (tmp_path / "losses.svg").read_text()
    assert ">ours</text>" in text
    assert "training loss against plain, %, mean of 2 steps" in text
