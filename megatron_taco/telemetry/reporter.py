"""Reports each logged step: console, ``metrics.jsonl``, TensorBoard and wandb.

The loss exists on the last pipeline stage only, the counts on every rank.  Both are combined in one
small sum over all ranks per logged step, so that rank 0 writes what the rank with the loss has and
byte figures are those of the whole run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from rich.table import Table

from megatron_taco.telemetry.console import flow_table, make_console, step_line
from megatron_taco.telemetry.costs import Cost, cost_table, records
from megatron_taco.telemetry.counters import Counters, FlowTotal
from megatron_taco.telemetry.trackers import attach, write_scalars

Scalar = float | torch.Tensor


def _number(value: Scalar | None) -> float | None:
    """A Python number from a number, a one-element tensor, or None."""
    return None if value is None else float(value)


def _finite(value: Any) -> Any:
    """The same record with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Reporter:
    """Collects the figures of the training loop and reports them from rank 0.

    Args:
        counters: this rank's flow counts; no flows when nothing is compressed.
        stream: where rank 0's console lines go.
        metrics: path of ``metrics.jsonl``, or None to write no file.
        log_interval: steps between two reports.
        extra: gives further entries of a step's record; every rank calls it for every record.
        describe: gives what is attached to TensorBoard and wandb at the first report.
    """

    def __init__(
        self,
        *,
        counters: Counters,
        stream: IO[str],
        metrics: Path | None,
        log_interval: int,
        extra: Callable[[], dict[str, Any]] | None = None,
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.counters = counters
        self._extra = extra
        self._describe = describe
        self._attached = False
        self.log_interval = log_interval
        self._console = make_console(stream)
        self._stream = stream
        self._metrics = metrics
        self._times: list[float] = []
        self._reported = [0.0] * (len(counters.flows) * Counters.width())
        self._loss: list[torch.Tensor | float] = []

    def _reduce(self, numbers: Sequence[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        """Reduce plain numbers over all ranks; the same result on each."""
        vector = torch.tensor(
            numbers, dtype=torch.float64, device=torch.device(torch.cuda.current_device())
        )
        dist.all_reduce(vector, op=op)
        return vector.tolist()

    def _write(self, record: Mapping[str, Any]) -> None:
        if dist.get_rank() == 0 and self._metrics is not None:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def note(self, event: str, iteration: int, **values: Any) -> None:
        """Write a record of its own kind into the metrics."""
        record = {"event": event, "iteration": iteration, "time": time.time(), **values}
        self._write(record)

    def say(self, line: str) -> None:
        """Print a line from rank 0."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(line, file=self._stream, flush=True)

    def show(self, table: Table) -> None:
        """Print a table from rank 0."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._console.print(table)

    def resumed(self, iteration: int) -> None:
        """Say, and note in the metrics, that training goes on after a checkpoint's step."""
        self._write({"event": "resume", "iteration": iteration, "time": time.time()})
        self.say(f"resumed after step {iteration}")

    def add_step_time(self, seconds: float) -> None:
        """Note how long one training step took on this rank."""
        self._times.append(seconds)

    def totals(self) -> list[FlowTotal]:
        """Counts of all flows over all ranks since the start; a collective call."""
        vector = self.counters.vector()
        if not vector:
            return []
        return self.counters.totals(self._reduce(vector), self._reduce(vector, dist.ReduceOp.MAX))

    def step(
        self,
        *,
        iteration: int,
        last_iteration: int,
        loss: Scalar | None,
        grad_norm: Scalar | None,
        learning_rate: Scalar | None,
        loss_scale: Scalar | None,
        skipped: bool,
        tokens: int,
        writers: Sequence[Any],
    ) -> None:
        """Take a step's figures, and report when one is due; every rank calls it for every step.

        The reported loss is the mean over the steps since the last report.  Numbers that are still
        on the device are read only then.

        Args:
            iteration: steps done so far, this one included.
            last_iteration: the step at which training ends.
            loss: mean loss of the global batch, on ranks that have it.
            grad_norm: norm of the gradient before clipping.
            learning_rate: the rate of this step.
            loss_scale: loss scale of FP16 training.
            skipped: whether the optimiser skipped the step.
            tokens: tokens in a global batch.
            writers: Megatron's TensorBoard and wandb writers, on the rank that has them.
        """
        if loss is not None:
            self._loss.append(loss)
        if iteration % self.log_interval and iteration != last_iteration:
            return
        vector = self.counters.vector()
        total = sum(float(value) for value in self._loss)
        reduced = self._reduce([total, float(len(self._loss)), *vector])
        self._loss.clear()
        mean_loss = reduced[0] / reduced[1] if reduced[1] else None
        summed = reduced[2:]
        fresh = [now - before for now, before in zip(summed, self._reported, strict=True)]
        self._reported = summed
        flows = [total for total in self.counters.totals(fresh, fresh) if total.seen]
        seconds = sum(self._times) / max(1, len(self._times))
        self._times.clear()
        record = {
            "event": "step",
            "iteration": iteration,
            "loss": mean_loss,
            "grad_norm": _number(grad_norm),
            "learning_rate": _number(learning_rate),
            "loss_scale": _number(loss_scale),
            "skipped": skipped,
            "step_ms": seconds * 1e3,
            "tokens_per_s": tokens / seconds if seconds else None,
            "time": time.time(),
            "flows": {str(total.flow): self._flow_record(total) for total in flows},
            **(self._extra() if self._extra is not None else {}),
        }
        self._write(record)
        self._track(writers, iteration, flows)
        if dist.get_rank() == 0:
            self.say(
                step_line(
                    iteration=iteration,
                    last_iteration=last_iteration,
                    loss=mean_loss,
                    grad_norm=_number(grad_norm),
                    learning_rate=_number(learning_rate),
                    step_ms=seconds * 1e3,
                    tokens_per_s=tokens / seconds if seconds else 0.0,
                    ratios=self._role_ratios(flows),
                    skipped=skipped,
                )
            )

    def _track(self, writers: Sequence[Any], iteration: int, flows: Sequence[FlowTotal]) -> None:
        if writers and not self._attached:
            self._attached = True
            attach(writers, self._describe())
        write_scalars(writers, iteration, flows)

    @staticmethod
    def _flow_record(total: FlowTotal) -> dict[str, Any]:
        return {
            "calls": total.seen,
            "compressed": total.compressed,
            "raw_bytes": total.raw,
            "wire_bytes": total.wire,
            "error": total.error,
            "nonfinite_blocks": total.nonfinite_blocks,
        }

    @staticmethod
    def _role_ratios(flows: Sequence[FlowTotal]) -> list[tuple[str, float]]:
        """Wire over raw for each role of which something was compressed."""
        raw: dict[str, int] = {}
        wire: dict[str, int] = {}
        compressed: dict[str, int] = {}
        for total in flows:
            role = total.flow.role
            raw[role] = raw.get(role, 0) + total.raw
            wire[role] = wire.get(role, 0) + total.wire
            compressed[role] = compressed.get(role, 0) + total.compressed
        return [(role, wire[role] / raw[role]) for role in raw if compressed[role] and raw[role]]

    def evaluation(self, *, label: str, iteration: int, loss: Scalar | None) -> None:
        """Report the loss on a held-out set; every rank calls it.

        Args:
            label: ``validation`` or ``test``.
            iteration: steps done so far.
            loss: mean loss, on ranks that have it.
        """
        total, count = self._reduce([_number(loss) or 0.0, float(loss is not None)])
        if not count:
            return
        mean = total / count
        self._write({"event": label, "iteration": iteration, "loss": mean, "time": time.time()})
        self.say(f"{label} loss after step {iteration}: {mean:.4f}")

    def finish(self, costs: Sequence[Cost] = (), steps: int = 0) -> list[FlowTotal]:
        """Print the end tables from rank 0; every rank calls it.

        Args:
            costs: What compression costs this rank, the same axes on all ranks.
            steps: Training steps of this process.
        """
        totals = self.totals()
        found: dict[str, dict[str, Any]] = {}
        if costs:
            numbers = [number for cost in costs for number in cost.numbers()]
            largest = self._reduce(numbers, dist.ReduceOp.MAX)
            found = records([cost.axis for cost in costs], largest, steps)
        if any(total.seen for total in totals):
            self._write(
                {
                    "event": "end",
                    "time": time.time(),
                    "flows": {str(t.flow): self._flow_record(t) for t in totals if t.seen},
                    "costs": found,
                }
            )
            self.show(
                flow_table(totals, "What the links carried (all ranks, training and evaluation)")
            )
            if found:
                self.show(cost_table(found))
        return totals
