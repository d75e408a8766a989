"""Runs a list of benchmarks, each once, and keeps what they report: JSON, plot, and a page.

A part whose JSON is there already is not run again, so that a long list can be stopped and gone on
with. One that fails, or for which there are too few GPUs, stops no other and is named at the end.
The page is made anew from all JSON that is there; see ``results_page``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from megatron_taco.cli.lab_arguments import words
from megatron_taco.lab import part_run, results_page
from megatron_taco.lab.link import LabError
from megatron_taco.lab.part import Part
from megatron_taco.lab.part_order import Nodes
from megatron_taco.lab.places import visible_gpus
from megatron_taco.lab.plot_file import plot_file
from megatron_taco.lab.signals import Caught

__all__ = ["Part", "main"]

REFUSED: Final = 2
_SMALL: Final = (
    "CPU ranks over gloo, with models and messages cut to small sizes: bytes, errors and losses "
    "mean something here, times and ratios of times do not."
)


def main(
    parts: Sequence[Part],
    page: Path,
    description: str,
    argv: Sequence[str] | None = None,
    *,
    heading: str = "",
    meet: Callable[[], Nodes | None] = lambda: None,
) -> int:
    """Runs what is missing of some parts and writes their plots and the page.

    Args:
        parts: All parts of the page, in its order.
        page: The Markdown file; a folder of the same name beside it holds JSON and plots. The small
            form has a page of its own, ``NAME-small.md``, without plots.
        description: For ``--help``.
        argv: Arguments; those of the process by default.
        heading: Title and text that a new page begins with; its name by default.
        meet: Returns the machines that run the parts together, once it is time to run; None for
            this one alone.

    Returns:
        0; or the exit code of the first part that failed, 2 for one that was refused. The others
        are run all the same. 128 + the signal if it was told to end.
    """
    args = _arguments(parts, page, description, argv)
    if args.small:
        parts = [part.in_small_form() for part in parts]
        title, _, text = (heading or results_page.heading(page)).partition("\n")
        heading = "\n".join([f"{title}, in small form", *([text] if text else []), "", _SMALL])
    try:
        nodes = None if args.list or args.page_only else meet()
        work = _Work(parts, args, heading, nodes)
        with Caught() as caught:
            if nodes is not None and not nodes.first:
                return work.follow(nodes, caught)
            return work.lead(caught)
    except LabError as error:
        print(f"== {error}", file=sys.stderr)
        return REFUSED


def _arguments(
    parts: Sequence[Part], page: Path, description: str, argv: Sequence[str] | None
) -> argparse.Namespace:
    names = tuple(part.name for part in parts)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        type=words(names),
        default=",".join(names),
        metavar="LIST",
        help=f"of {', '.join(names)} (default: all)",
    )
    parser.add_argument("--again", action="store_true", help="also those that are there already")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    parser.add_argument(
        "--small",
        action="store_true",
        help="on CPUs over gloo, with small models and messages, onto a page of its own",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="start no part after so many; the same command goes on with the rest",
    )
    parser.add_argument("--commit", help="that is measured, for the page (default: git's HEAD)")
    parser.add_argument("--page", type=Path, help=f"default: {page}, with --small ...-small.md")
    args = parser.parse_args(argv)
    if args.page is None:
        args.page = page.with_stem(f"{page.stem}-small") if args.small else page
    args.plots = not args.small
    try:
        if args.plots:
            plot_file("plot.svg")  # a missing matplotlib is found out before anything runs
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return args


class _Work:
    """What is to be run of some parts, and what came of it."""

    def __init__(
        self, parts: Sequence[Part], args: argparse.Namespace, heading: str, nodes: Nodes | None
    ) -> None:
        self._parts = parts
        self._args = args
        self._heading = heading
        self._nodes = nodes
        self._folder: Path = args.page.with_suffix("")
        self._commit = args.commit or _head()
        self._said: list[str] = []

    def lead(self, caught: Caught) -> int:
        """Runs the parts on this machine, or as the first of several."""
        result, start = 0, time.monotonic()
        for part in self._parts:
            file = self._folder / f"{part.name}.json"
            if part.name not in self._args.parts or self._args.page_only:
                continue
            if self._args.list:
                what = part.shown if part.command else f"(no small form: {part.no_small})"
                print(f"{part.name:<32} {'there' if file.exists() else '-':<5} {what}")
                continue
            if file.exists() and not self._args.again:
                continue
            if not part.command:
                self._said.append(f"{part.name}: no small form: {part.no_small}")
                continue
            if self._args.seconds is not None and time.monotonic() - start > self._args.seconds:
                self._said.append(f"{part.name}: not started")
                continue
            if self._nodes is not None and not self._nodes.complete():
                self._said.append(f"{part.name}: not started, a machine has quit")
                result = result or REFUSED
                continue
            code = self._run(part, file, caught)
            result = result or code
            if caught.exit_code is not None:
                result = caught.exit_code
                break
        if self._nodes is not None:
            self._nodes.leave()
        if not self._args.list:
            self._write()
            self._summary()
        return result

    def follow(self, nodes: Nodes, caught: Caught) -> int:
        """Runs what the first machine announces; the results are there."""
        result = 0
        by_name = {part.name: part for part in self._parts}
        for name in nodes.announced():
            if (refused := _refusal(by_name[name])) is not None:
                print(f"== {name}: {refused}", file=sys.stderr, flush=True)
                nodes.ended(REFUSED)
                result = result or REFUSED
                continue
            with tempfile.TemporaryDirectory() as folder:
                code = self._start(by_name[name], Path(folder) / "unused.json", caught)[0]
            result = result or code
            if caught.exit_code is not None:
                nodes.quit()
                return caught.exit_code
        return result

    def _run(self, part: Part, file: Path, caught: Caught) -> int:
        """Runs one part; its JSON gets its name only when it is complete."""
        if (refused := _refusal(part)) is not None:
            self._said.append(f"{part.name}: {refused}")
            return REFUSED
        print(f"== {part.name}: {part.shown}", flush=True)
        if self._nodes is not None:
            self._nodes.announce(part.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial.json")
        date, start = datetime.datetime.now(datetime.UTC), time.monotonic()
        try:
            code, wrong = self._start(part, partial, caught)
            if code:
                self._said.append(f"{part.name}: {wrong}")
                print(f"== {part.name}: {wrong}", file=sys.stderr, flush=True)
                return code
            report = json.loads(partial.read_text(encoding="utf-8"))
            seconds = time.monotonic() - start
            report["run"] = {
                "command": part.shown,
                "date": f"{date:%Y-%m-%d}",
                "commit": self._commit,
                "seconds": round(seconds),
            }
            file.write_text(json.dumps(report) + "\n", encoding="utf-8")
        finally:
            partial.unlink(missing_ok=True)
        aim = f"; aim: {part.aim}" if part.aim else ""
        print(f"== {part.name}: done in {seconds:.0f} s{aim}", flush=True)
        self._write()
        return 0

    def _start(self, part: Part, file: Path, caught: Caught) -> tuple[int, str]:
        nodes = self._nodes
        code, wrong = part_run.run(
            [*part.command, "--json", str(file)],
            part.environment,
            caught=caught,
            stopped=(lambda: None) if nodes is None else nodes.stopped,
        )
        if nodes is not None:
            nodes.ended(code)
        return code, wrong

    def _summary(self) -> None:
        there = [p.name for p in self._parts if (self._folder / f"{p.name}.json").exists()]
        print(
            f"== {len(there)} of {len(self._parts)} parts are there: {self._args.page}", flush=True
        )
        if self._said:
            print("== not done:", *self._said, sep="\n==   ", file=sys.stderr, flush=True)

    def _write(self) -> None:
        """Writes the sections of all parts that have been run, and draws their plots."""
        sections = []
        for part in self._parts:
            file = self._folder / f"{part.name}.json"
            if file.exists():
                report = json.loads(file.read_text(encoding="utf-8"))
                sections.append(
                    results_page.Section(
                        name=part.name,
                        title=part.title,
                        aim=part.aim,
                        report=report,
                        folder=self._folder,
                        plot=self._args.plots,
                    )
                )
        if sections:
            results_page.write(self._args.page, sections, self._heading)


def _refusal(part: Part) -> str | None:
    """Why a part cannot run on this machine, in one line; None if it can."""
    found = len(visible_gpus()) if part.gpus else 0
    if found < part.gpus:
        what = f"{part.gpus} GPU{'s' if part.gpus > 1 else ''}"
        return f"needs {what}, found {found or 'none'}; --small runs it on CPUs"
    return None


def _head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
