"""Runs a list of benchmarks, each once, and keeps what they report: JSON, plot, and a page.

A part whose JSON is there already is not run again, so that a long list can be stopped and gone on
with. The page is made anew from all JSON that is there; see ``results_page``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron_taco.cli.lab_arguments import words
from megatron_taco.lab import results_page
from megatron_taco.lab.plot_file import plot_file

TIMEOUT_S: Final = 540.0
_END_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """One benchmark of a list.

    Attributes:
        name: Of its files.
        title: Of its section on the page.
        command: What Python is to run; it takes ``--json FILE``.
        environment: Variables that it is given.
        aim: What it is to reach, for the page; may be empty.
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    aim: str = ""

    @property
    def shown(self) -> str:
        """The command as a user types it."""
        text = shlex.join(("python", *self.command))
        text = text.replace("python -m megatron_taco.cli", "megatron-taco")
        return " ".join([*(f"{k}={v}" for k, v in self.environment.items()), text])


def main(
    parts: Sequence[Part], page: Path, description: str, argv: Sequence[str] | None = None
) -> int:
    """Runs what is missing of some parts and writes their plots and the page.

    Args:
        parts: All parts of the page, in its order.
        page: The Markdown file; a folder of the same name beside it holds JSON and plots.
        description: For ``--help``.
        argv: Arguments; those of the process by default.

    Returns:
        0; or the exit code of the first part that failed. The others are run all the same.
    """
    names = tuple(part.name for part in parts)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--parts",
        type=words(names),
        default=",".join(names),
        metavar="LIST",
        help=f"of {', '.join(names)} (default: all)",
    )
    parser.add_argument("--again", action="store_true", help="also those that are there already")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    parser.add_argument("--commit", help="that is measured, for the page (default: git's HEAD)")
    parser.add_argument("--page", type=Path, default=page, help=f"default: {page}")
    args = parser.parse_args(argv)
    folder: Path = args.page.with_suffix("")
    try:
        plot_file(f"{folder.name}.svg")  # a missing matplotlib is found out before anything runs
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    commit = args.commit or _head()
    failed = 0
    for part in parts:
        file = folder / f"{part.name}.json"
        if part.name not in args.parts or args.page_only or (file.exists() and not args.again):
            continue
        print(f"== {part.name}: {part.shown}", flush=True)
        code = _run(part, file, commit)
        if code:
            print(f"== {part.name} failed with exit code {code}", file=sys.stderr, flush=True)
            failed = failed or code
        results_page.write(args.page, _sections(parts, folder))
    results_page.write(args.page, _sections(parts, folder))
    return failed


def _run(part: Part, file: Path, commit: str) -> int:
    """Runs one part; its JSON gets its name only when it is complete."""
    partial = file.with_suffix(".partial.json")
    start = datetime.datetime.now(datetime.UTC)
    process = subprocess.Popen(
        [sys.executable, *part.command, "--json", str(partial)],
        env={**os.environ, **part.environment},
    )
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"== {part.name}: not done within {TIMEOUT_S:.0f} s", file=sys.stderr, flush=True)
        code = 124
    finally:
        if process.poll() is None:
            process.terminate()  # benchmarks end their ranks and remove their links themselves
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if code == 0:
        report = json.loads(partial.read_text(encoding="utf-8"))
        report["run"] = {"command": part.shown, "date": f"{start:%Y-%m-%d}", "commit": commit}
        file.write_text(json.dumps(report) + "\n", encoding="utf-8")
    partial.unlink(missing_ok=True)
    return code


def _sections(parts: Sequence[Part], folder: Path) -> list[results_page.Section]:
    """The sections of all parts that have been run, their plots drawn."""
    found = []
    for part in parts:
        file = folder / f"{part.name}.json"
        if file.exists():
            report = json.loads(file.read_text(encoding="utf-8"))
            found.append(
                results_page.Section(
                    name=part.name, title=part.title, aim=part.aim, report=report, folder=folder
                )
            )
    return found


def _head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
