"""Is the link as slow as it says? ``python -m megatron_taco.lab.link_check`` on ranks of a lab.

A token bucket that is too large, traffic that takes another way, a qdisc that counts wrongly: all
show as messages that arrive sooner than bytes / rate. So after a silence, in which the bucket
fills, a message to another host and an all-to-all must take at least 0.98 of that time. Much longer
is no fault of the link but of the machine or the backend (gloo's all-to-all often sends one way at
a time); it is said where one way is slow too, and does not make the lab unusable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_taco.lab.link import LINK_VARIABLE, RankLink
from megatron_taco.lab.rates import wire_seconds
from megatron_taco.lab.sizes import parse_sizes
from megatron_taco.lab.timing import SILENCE_S, Timer, process_group

AT_LEAST: Final = 0.98
SLOW: Final = 1.25
"""Times bytes / rate, above which the machine and not the link sets the time."""
ONE_WAY: Final = "one way"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One message size of one pattern.

    Attributes:
        pattern: ``one way``, a message from the first host to the second, or ``all-to-all``.
        size: Bytes of the message, or of each rank's all-to-all.
        crossing: Bytes that one host's link carries each way.
        expected_s: ``crossing`` / rate.
        measured_s: Seconds, one for each repetition.
    """

    pattern: str
    size: int
    crossing: int
    expected_s: float
    measured_s: list[float]

    @property
    def share(self) -> float:
        """The shortest time as a multiple of what the rate allows."""
        return min(self.measured_s) / self.expected_s

    @property
    def honest(self) -> bool:
        """Whether nothing arrived sooner than the rate allows."""
        return self.share >= AT_LEAST


def measure(
    group: ProcessGroup, device: torch.device, place: RankLink, sizes: Sequence[int], repeats: int
) -> list[Check]:
    """Times messages of ``sizes`` bytes; all ranks get the same answer.

    Args:
        group: All ranks of the lab.
        device: Where to take the messages from.
        place: The link.
        sizes: Bytes; rounded down to a multiple of the ranks, at least one byte for each.
        repeats: How often each.
    """
    timer = Timer(group, device)
    rank, ranks = group.rank(), group.size()
    checks = []
    for size in (max(ranks, size - size % ranks) for size in sizes):
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)

        def one_way(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            if rank == 0:
                dist.send(sent, place.ranks_per_host, group=group)
            elif rank == place.ranks_per_host:
                dist.recv(received, 0, group=group)

        def all_to_all(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            dist.all_to_all_single(received, sent, group=group)

        for pattern, call, crossing in (
            (ONE_WAY, one_way, size),
            ("all-to-all", all_to_all, place.crossing(size)),
        ):
            seconds = [timer.time(call) for _ in range(repeats)]
            checks.append(
                Check(
                    pattern=pattern,
                    size=size,
                    crossing=crossing,
                    expected_s=wire_seconds(crossing, place.link.rate),
                    measured_s=timer.slowest(seconds),
                )
            )
    return checks


def verdict(checks: Sequence[Check]) -> str:
    """Returns one line on what the times say of the lab."""
    worst = min(checks, key=lambda check: check.share)
    if not worst.honest:
        return (
            f"UNUSABLE: {worst.pattern} of {worst.size} bytes took {worst.share:.3f} of bytes / "
            f"rate (at least {AT_LEAST} is needed); a smaller --burst may help"
        )
    slowest = max((check.share for check in checks if check.pattern == ONE_WAY), default=1.0)
    if slowest > SLOW:
        return (
            f"usable, but this machine does not fill the link: one way took {slowest:.2f} × bytes "
            "/ rate; times on it are those of a slower link"
        )
    return "usable: nothing arrives before bytes / rate"


def show(place: RankLink, checks: Sequence[Check]) -> None:
    """Prints the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(
        f"link check after {SILENCE_S * 1e3:.0f} ms of silence: {place.hosts} hosts × "
        f"{place.ranks_per_host} ranks, {place.link}"
    )
    table = Table()
    table.add_column("pattern")
    for name in ("bytes", "over the link", "bytes / rate ms", "measured ms", "share"):
        table.add_column(name, justify="right")
    for check in checks:
        low, high = min(check.measured_s), max(check.measured_s)
        table.add_row(
            check.pattern,
            f"{check.size:,}",
            f"{check.crossing:,}",
            f"{check.expected_s * 1e3:.2f}",
            f"{low * 1e3:.2f} - {high * 1e3:.2f}",
            f"{check.share:.3f}",
        )
    console.print(table)
    console.print(verdict(checks))


def main(argv: Sequence[str] | None = None) -> int:
    """Check the link that this rank is on; rank 0 returns 1 if it is not usable."""
    parser = argparse.ArgumentParser(prog="python -m megatron_taco.lab.link_check")
    parser.add_argument("--sizes", type=parse_sizes, default="16MiB,128MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    place = RankLink.from_environment()
    if place is None:
        parser.error(f"not a rank of a lab: {LINK_VARIABLE} is not set")
    with process_group() as (group, device):
        checks = measure(group, device, place, args.sizes, args.repeats)
        rank = group.rank()
    usable = all(check.honest for check in checks)
    if rank == 0:
        show(place, checks)
        if args.json:
            report = {
                "place": asdict(place),
                "usable": usable,
                "checks": [{**asdict(check), "share": check.share} for check in checks],
            }
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if rank == 0 and not usable else 0


if __name__ == "__main__":
    sys.exit(main())
