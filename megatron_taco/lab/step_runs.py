"""Trains and measures on this rank for ``bench step``, and reports on rank 0."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_taco.config import Config, ConfigError, load
from megatron_taco.lab import link_check, plots, step_arms, step_config, step_report
from megatron_taco.lab.link import LabError, RankLink
from megatron_taco.lab.step_arms import Arm, ArmConfigs, Layout, world_size
from megatron_taco.lab.step_driver import StepDriver, Steps
from megatron_taco.lab.step_schedule import AUTO, FP32, PLAIN, SILENT, Schedule, schedule

_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_MEGATRON = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "grad_reduce_in_bf16",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "bf16",
)


def measure(args: argparse.Namespace) -> int:
    """Trains through all turns, prints the table and writes the JSON on rank 0.

    Returns:
        0; 1 if the lab's link did not pass its own check, which the report says too; else the
        trainer's exit code, after its message.
    """
    from megatron_taco.training.run import OK, USER_ERROR, run

    place = RankLink.from_environment()
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="megatron-taco-bench-step-"))
    try:
        path = args.config or step_config.write(folder, args.axis, gpu=gpu)
        arms: list[Arm] = []
        configs = ArmConfigs(pipeline={}, data={})
        if args.only is None:
            arms, configs = _arms(args, path)
        plan = schedule(
            [arm.name for arm in arms], cycles=args.cycles, settle=args.settle, steps=args.steps
        )
        overrides = [
            *args.overrides,
            *step_config.forced(
                folder,
                formats=[a.tensor for a in arms if a.tensor not in (PLAIN, SILENT)],
                block=args.block,
                scales=args.scales,
                uncompressed=args.only or "sdpa",
                steps=plan.length + 1,
            ),
        ]
        config = load(path, overrides)
    except (ConfigError, LabError) as error:
        shutil.rmtree(folder)
        if isinstance(error, LabError):
            raise
        if os.environ["RANK"] == "0":  # all ranks find the same mistake
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    driver = StepDriver(plan, place, arms, configs)
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(str(path), overrides, make_session=driver.make_session)
    if code not in (OK, USER_ERROR):
        return code  # the folder stays: the trainer's message names the logs in it
    shutil.rmtree(folder)
    if code:
        return code
    if driver.steps is None:
        raise RuntimeError("training ended before the last turn of the benchmark did")
    _refuse_plain(plan, driver.steps)
    usable = all(check.honest for check in driver.steps.checks)
    if os.environ["RANK"] != "0":
        return 0
    report = _report(args, config, plan, driver.steps, place, usable)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.only is None:
        if place is not None:
            link_check.show(place, driver.steps.checks)
        show(report)
    if args.plot is not None:
        plots.draw(report, args.plot)
    return 0 if usable else 1


def _arms(args: argparse.Namespace, path: Path) -> tuple[list[Arm], ArmConfigs]:
    """Returns the arms but ``plain`` of the axis that was asked for, and their configurations."""
    config = load(path, args.overrides)
    axes = Layout.of(config, world_size()).axes(args.axis)
    arms = step_arms.arms_of(
        args.axis,
        axes,
        formats=args.formats,
        boundaries=args.boundaries,
        compressors=args.compressors,
    )
    return arms, step_arms.configs(path, args.overrides, config, arms, axes)


def _refuse_plain(plan: Schedule, steps: Steps) -> None:
    """Refuse figures of an arm that compressed nothing."""
    compressed = steps.column(3)
    for turn, numbers in plan.counted():
        if turn.arm not in (PLAIN, SILENT, AUTO, FP32) and not compressed[numbers[0]]:
            raise LabError(
                f"nothing went compressed in {turn.arm}: all messages are below min_bytes; lower "
                "compression.tensor_parallel.min_bytes or compression.data_parallel.min_bytes"
            )


def _report(
    args: argparse.Namespace,
    config: Config,
    plan: Schedule,
    steps: Steps,
    place: RankLink | None,
    usable: bool,
) -> dict[str, Any]:
    found, exposed = step_report.arms(
        plan,
        seconds=steps.seconds,
        raw=steps.column(0),
        wire=steps.column(1),
        calls=steps.column(2),
        compressed=steps.column(3),
        peak_bytes=steps.peak_bytes,
        rate=place.link.rate if place is not None and place.ranks_per_host == 1 else None,
    )
    others = {}
    for name, file in args.other or ():
        record = json.loads(Path(file).read_text(encoding="utf-8"))
        others[name] = record["arms"][0]["step_s"]
    return {
        "benchmark": "step",
        "about": _about(args, config),
        "place": asdict(place) if place else None,
        "link_check": [{**asdict(check), "share": check.share} for check in steps.checks],
        "usable": usable,
        "exposed": exposed,
        "arms": [arm.record() for arm in found],
        "flows": step_report.flows(plan, steps.sent),
        "work": [asdict(work) for work in steps.work],
        "other_uncompressed": others,
        "turns": [asdict(turn) for turn in plan.turns],
        "seconds": steps.seconds,
    }


def _about(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    from megatron_taco.training.run_folder import environment

    found = environment()
    sizes = {name: getattr(config.model, name) for name in _MODEL}
    settings = {name: config.megatron.get(name) for name in _MEGATRON}
    settings["seq_length"] = settings["seq_length"] or config.model.max_position_embeddings
    return {
        "ranks": found["world_size"],
        "backend": "nccl" if found["gpus"] else "gloo",
        "device": found["gpus"][0] if found["gpus"] else "CPU",
        "cpus": found["cpus"],
        "python": found["python"],
        "platform": found["platform"],
        "cuda": found["cuda"],
        "versions": found["versions"],
        "model": config.model.preset or Path(args.config).stem,
        **sizes,
        **settings,
        "axis": args.axis,
        "data_parallel_size": Layout.of(config, found["world_size"]).data,
        "uncompressed": args.only or "sdpa",
        "min_bytes": config.compression.tensor_parallel.min_bytes,
        "block": args.block,
        "scales": args.scales,
        "cycles": args.cycles,
        "steps": args.steps,
        "settle": args.settle,
        "nccl_p2p_disable": os.environ.get("NCCL_P2P_DISABLE", "0"),
    }


def show(report: Mapping[str, Any]) -> None:
    """Prints a report as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    console.print(
        f"{step_report.describe(report)}. {plots.where(report)}; torch "
        f"{report['about']['versions']['torch']}; medians, least-most in brackets"
    )
    table = Table(title=None if report["usable"] else "UNUSABLE: the link is faster than it says")
    head, rows = step_report.table(report)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in step_report.notes(report):
        console.print(line)
