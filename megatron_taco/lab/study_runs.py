"""Runs the arms of a study one after the other, within a time, and goes on where it stopped.

A run that is done is a JSON file and is not made again. One that was stopped (the time was over,
Ctrl-C, SIGTERM) has saved a checkpoint and goes on from it, if its run folder is still there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from megatron_taco.lab.forked import Forked
from megatron_taco.lab.study import run_record

GRACE_S: Final = 20.0
START_S: Final = 20.0
"""Seconds that a run may take to save when it is stopped, and to start."""

Overrides = Callable[[str, int, int], list[str]]
"""The trainer's settings of a run, from its arm, seed and steps."""


def train(config: str, overrides: list[str]) -> int:
    """Train, in a process of its own; at SIGTERM Megatron saves a checkpoint and ends."""
    from megatron_taco.training.run import run

    return run(config, [*overrides, "megatron.exit_signal_handler=true"])


class StudyRuns:
    """All runs of a study.

    Args:
        config: Of the trainer.
        overrides: Makes those of a run.
        folder: Gets the JSON of runs that are done.
        runs: Folder of run folders.
        seconds: Of all runs; None is no limit.
        cpu: Whether they are on a CPU.
    """

    def __init__(
        self,
        config: Path,
        overrides: Overrides,
        *,
        folder: Path,
        runs: Path,
        seconds: float | None,
        cpu: bool,
    ) -> None:
        self._config, self._overrides = config, overrides
        self._folder, self._runs = folder, runs.resolve()
        self._deadline = float("inf") if seconds is None else time.monotonic() + seconds
        self._forked = Forked(cpu=cpu)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._deadline - time.monotonic()

    def step_seconds(self, arm: str, steps: int) -> float:
        """Return the median time of a step of an arm.

        Raises:
            RuntimeError: If the run fails.
        """
        folder = self._runs / "calibration"
        code = self._train(arm, 0, steps, folder, ["megatron.eval_interval=null"])
        if code:
            raise RuntimeError(f"exit code {code}, see {_log(folder)}")
        return float(_record(folder)["step_ms"]) / 1e3

    def run(self, arms: Sequence[str], seeds: Sequence[int], steps: int) -> int:
        """Make the runs that are missing; returns 0, or the exit code of the first that failed.

        Args:
            arms: Names, in order.
            seeds: All arms of one come before those of the next.
            steps: Of every run.
        """
        failed = 0
        for seed in seeds:
            for arm in arms:
                file = self._file(arm, seed)
                if file.exists():
                    continue
                if self.left < START_S + GRACE_S:
                    print("no time left: the same command goes on from here", flush=True)
                    return failed
                print(f"== {arm}, seed {seed}, {steps} steps", flush=True)
                folder = self._runs / f"{arm}-seed{seed}"
                code = self._train(arm, seed, steps, folder, self._saving(folder, steps))
                record = _record(folder)
                done = record["steps"][-1:] == [steps]
                if code and self.left > GRACE_S:
                    print(f"== {arm} failed: see {_log(folder)}", file=sys.stderr, flush=True)
                    failed = failed or code
                elif not done:
                    print(f"== {arm} stopped after step {record['steps'][-1:]}", flush=True)
                    return failed
                else:
                    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
        return failed

    def records(self, arms: Sequence[str]) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the runs that are done, by arm and seed, those of earlier calls included."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for arm in arms:
            for file in sorted(self._folder.glob(f"{arm}-seed*.json")):
                seed = int(file.stem.rpartition("-seed")[2])
                found.setdefault(arm, {})[seed] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def _file(self, arm: str, seed: int) -> Path:
        return self._folder / f"{arm}-seed{seed}.json"

    def _train(self, arm: str, seed: int, steps: int, folder: Path, more: list[str]) -> int:
        overrides = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
        overrides += [*self._overrides(arm, seed, steps), *more]
        folder.mkdir(parents=True, exist_ok=True)
        timeout = None if self.left == float("inf") else max(1.0, self.left - GRACE_S)
        (code,) = self._forked.run(
            train,
            (str(self._config), overrides),
            ranks=1,
            log=folder / "trainer.log",
            timeout_s=timeout,
        )
        return 0 if code is None else code

    @staticmethod
    def _saving(folder: Path, steps: int) -> list[str]:
        saved = folder / "checkpoints"
        found = [f"megatron.save={saved}", f"megatron.save_interval={steps // 2 + 1}"]
        if (saved / "latest_checkpointed_iteration.txt").exists():
            found.append(f"megatron.load={saved}")
        return found


def _log(folder: Path) -> Path:
    return folder / "trainer.log.0"


def _record(folder: Path) -> dict[str, Any]:
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return run_record(map(json.loads, text.splitlines()))
