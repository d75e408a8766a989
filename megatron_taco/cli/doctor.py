"""`megatron-taco doctor`: does Megatron fit our targets, does this machine, does a configuration.

A configuration is checked as far as one process can: what compression cannot see into, files that
are missing, and, unless `--quick`, Megatron's own parser and the data. Exit code 0 when all is
well, 1 when something has to change, 2 for a configuration that cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_taco.cli.machine import (
    Fact,
    describe_machine,
    has_cuda,
    planned_repairs,
    te_problems,
)
from megatron_taco.patching import conflicts
from megatron_taco.patching.fingerprints import known
from megatron_taco.patching.inspection import (
    Finding,
    inspect_all,
    megatron_root,
    megatron_version,
    package_root,
)
from megatron_taco.patching.target import MEGATRON, TRANSFORMER_ENGINE
from megatron_taco.patching.targets import SUPPORTED, TARGETS
from megatron_taco.patching.te_targets import TE_TARGETS

if TYPE_CHECKING:
    from megatron_taco.config import Config
    from megatron_taco.training.megatron_args import Device

_STYLES = {"ok": "green", "changed": "red", "missing": "red", "unsupported": "red"}
_LEVELS = {"ok": "", "note": "yellow", "problem": "red"}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that doctor found.

    Attributes:
        version: The megatron-core version, or None where there is none.
        findings: One for each target.
        machine: Facts about this machine.
        repairs: Start-up repairs that the trainer will make.
        config: The configuration file that was looked at, or None.
        conflicts: Why that configuration is refused.
        notes: What stays uncompressed in it.
    """

    version: str | None
    findings: list[Finding]
    machine: list[Fact]
    repairs: list[str]
    config: str | None
    conflicts: list[str]
    notes: list[str]

    @property
    def problems(self) -> list[str]:
        """One line for everything that has to change."""
        lines = []
        if self.version is None:
            lines.append(f"megatron-core is not installed: pip install 'megatron-core{SUPPORTED}'")
        else:
            lines += [
                f"{finding.target.name}: {finding.detail}"
                for finding in self.findings
                if finding.status != "ok" and finding.target.package == MEGATRON
            ]
        lines += [f"{fact.name}: {fact.value}" for fact in self.machine if fact.level == "problem"]
        return lines + self.conflicts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add doctor's arguments."""
    parser.add_argument("--config", metavar="FILE", help="also check this configuration")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="overrides of the configuration, as the trainer takes them",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="do not put the configuration through Megatron's parser, which takes some seconds",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; returns the exit code.

    Raises:
        ConfigError: `--config` names a file that is no configuration, or an override is wrong.
    """
    diagnosis = diagnose(args.config, args.overrides, quick=args.quick)
    if args.json:
        print(json.dumps(as_dict(diagnosis), indent=1))
    else:
        _show(diagnosis)
    return 1 if diagnosis.problems else 0


def diagnose(
    config_file: str | None = None, overrides: list[str] | None = None, *, quick: bool = False
) -> Diagnosis:
    """Look at Megatron, at this machine and, when given, at a configuration.

    Args:
        config_file: Path of a configuration.
        overrides: `dotted.key=value` for it.
        quick: Leave Megatron's parser and the data out.

    Raises:
        ConfigError: The configuration cannot be used, or overrides come without one.
    """
    cuda, root = has_cuda(), megatron_root()
    refusals: list[str] = []
    notes: list[str] = []
    if config_file is not None:
        from megatron_taco.config import load
        from megatron_taco.config.files import missing_files

        config = load(config_file, overrides or [])
        refusals, notes = conflicts.check(config), conflicts.notes(config)
        if not refusals and config.compression.tensor_parallel.enabled:
            uses_te = config.megatron.get("transformer_impl") == conflicts.TE_IMPL
            refusals += te_problems() if uses_te else []
        if config.run.device == "cuda" and not cuda:
            refusals.append(
                f"{config.where('run.device')}: run.device: cuda, and torch sees no GPU here; "
                "set run.device: auto or cpu"
            )
        missing = missing_files(config)
        refusals += map(str, missing)
        if not quick and root is not None:
            refusals += _megatron_refusals(config, cuda=cuda, with_data=not missing)
    elif overrides:
        from megatron_taco.config.errors import ConfigError

        raise ConfigError(f"command line: {overrides[0]}: overrides need --config FILE")
    return Diagnosis(
        version=megatron_version(root) if root else None,
        findings=inspect_all(TARGETS, known()) + _te_findings(),
        machine=describe_machine(root),
        repairs=planned_repairs(root, cuda),
        config=config_file,
        conflicts=refusals,
        notes=notes,
    )


def _te_findings() -> list[Finding]:
    """The targets in Transformer Engine, where that is installed."""
    if package_root(TRANSFORMER_ENGINE) is None:
        return []
    return inspect_all(TE_TARGETS, known(TRANSFORMER_ENGINE), TRANSFORMER_ENGINE)


def _megatron_refusals(config: Config, *, cuda: bool, with_data: bool) -> list[str]:
    """Return what Megatron's parser refuses, for the fewest processes the layout can run on.

    Args:
        config: The configuration.
        cuda: Whether torch sees a GPU; without one the CPU shim answers for it.
        with_data: Also look into the data.
    """
    from megatron_taco.config import ConfigError
    from megatron_taco.patching.cpu import CpuShim
    from megatron_taco.training import data_checks, megatron_args
    from megatron_taco.training.quiet import quiet

    device: Device = "cpu"
    if config.run.device == "cuda" or (config.run.device == "auto" and cuda):
        device = "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(megatron_args.environment(config, device)))
        stack.enter_context(quiet(io.StringIO()))
        if not cuda:
            stack.enter_context(CpuShim())
        size = megatron_args.smallest_world_size(config)
        try:
            args = megatron_args.parse(config, device=device, world_size=size)
        except ConfigError as error:
            return [str(problem) for problem in error.problems]
        return [str(found) for found in data_checks.check(config, args)] if with_data else []


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for a while."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as plain data for JSON."""
    return {
        "megatron_core": diagnosis.version,
        "supported": SUPPORTED,
        "targets": [
            {
                "name": finding.target.name,
                "axis": finding.target.axis,
                "attribute": finding.target.path,
                "file": finding.file,
                "version": finding.version,
                "source_of": finding.like,
                "status": finding.status,
                "detail": finding.detail,
                "fingerprints": finding.fingerprints,
            }
            for finding in diagnosis.findings
        ],
        "machine": [asdict(fact) for fact in diagnosis.machine],
        "repairs": diagnosis.repairs,
        "config": diagnosis.config,
        "conflicts": diagnosis.conflicts,
        "notes": diagnosis.notes,
        "problems": diagnosis.problems,
        "ok": not diagnosis.problems,
    }


def _show(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(
        f"targets in megatron-core {diagnosis.version or '(not installed)'}", style="bold"
    )
    width = max(len(finding.target.name) for finding in diagnosis.findings)
    for file in dict.fromkeys(finding.file for finding in diagnosis.findings):
        table = Table(title=file, title_justify="left", show_header=False)
        table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in diagnosis.findings:
            if finding.file == file:
                table.add_row(*_row(finding))
        console.print(table)
    table = Table(title="this machine", title_justify="left", show_header=False)
    for fact in diagnosis.machine:
        table.add_row(fact.name, escape(fact.value), style=_LEVELS[fact.level])
    console.print(table)
    sections = {
        "start-up repairs the trainer will make": diagnosis.repairs,
        f"notes on {diagnosis.config}": diagnosis.notes,
        "to be changed": diagnosis.problems,
    }
    for title, lines in sections.items():
        if lines:
            console.print(f"\n{escape(title)}:", style="bold")
            for line in lines:
                console.print(f"  - {escape(line)}", highlight=False, soft_wrap=True)
    if not diagnosis.problems:
        about = f"{diagnosis.config} and this machine fit" if diagnosis.config else "all fits"
        console.print(f"\n{escape(about)}", style="green")


def _row(finding: Finding) -> tuple[str, str, str, str]:
    digests = [digest[:6] for digest in finding.fingerprints.values() if digest]
    source = f"{finding.like or 'unknown'} {' '.join(digests)}" if digests else "-"
    return (
        finding.target.name,
        f"[{_STYLES[finding.status]}]{finding.status}[/]",
        source,
        finding.target.why,
    )
