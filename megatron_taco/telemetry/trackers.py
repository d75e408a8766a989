"""What goes into TensorBoard and wandb, through the writers that Megatron has set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron_taco.telemetry.counters import FlowTotal


def write_scalars(writers: Sequence[Any], iteration: int, flows: Sequence[FlowTotal]) -> None:
    """Write each flow's bytes, and its error in a step where that was sampled.

    Args:
        writers: Megatron's TensorBoard and wandb writers.
        iteration: steps done so far.
        flows: totals since the last report.
    """
    for total in flows:
        name = f"megatron_taco/{total.flow.role}/{total.flow.collective}"
        scalars: dict[str, float] = {"wire_bytes": total.wire, "raw_bytes": total.raw}
        if total.error is not None:
            scalars["error"] = total.error
        for writer in writers:
            if _is_tensorboard(writer):
                for key, value in scalars.items():
                    writer.add_scalar(f"{name}/{key}", value, iteration)
            else:
                writer.log({f"{name}/{key}": value for key, value in scalars.items()}, iteration)


def attach(writers: Sequence[Any], descriptions: Mapping[str, Any]) -> None:
    """Attach what describes a run: a text each in TensorBoard, ``config`` keys in wandb.

    Args:
        writers: Megatron's TensorBoard and wandb writers.
        descriptions: plain data by name, such as the resolved configuration.
    """
    for writer in writers:
        if _is_tensorboard(writer):
            for name, described in descriptions.items():
                text = yaml.safe_dump(described, sort_keys=False)
                writer.add_text(f"megatron_taco/{name}", f"```yaml\n{text}```")
        else:
            named = {f"megatron_taco_{name}": value for name, value in descriptions.items()}
            writer.config.update(named, allow_val_change=True)


def _is_tensorboard(writer: Any) -> bool:
    return hasattr(writer, "add_scalar")
