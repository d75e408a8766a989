"""What a lab is: its name, its hosts, and the link between them. Plain data, no kernel calls."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from megatron_taco.lab.rates import format_rate

PREFIX: Final = "taco"
"""With a number after it, the start of every name that the lab gives to anything."""
LINK_VARIABLE: Final = "MEGATRON_TACO_LINK"
"""Environment variable that tells ranks about the link they are on."""
MAX_HOSTS: Final = 64
MTU: Final = 9000

NAMESPACE: Final = re.compile(rf"({PREFIX}\d+)-(?:h(\d+)|switch)\Z")
"""Matches the namespaces of labs, and nothing else."""


class LabError(Exception):
    """Something that the user or this machine has to have different. Exit code 2, one message."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One host's link, the same for all hosts and in both directions.

    Attributes:
        rate: Bits per second.
        burst: Size of the token bucket, in bytes.
        mtu: Bytes.
        delay_us: One-way delay in microseconds; needs the kernel's netem.
    """

    rate: int
    burst: int
    mtu: int = MTU
    delay_us: int = 0

    def __str__(self) -> str:
        """Returns one line for tables and logs."""
        delay = f", delay {self.delay_us} µs" if self.delay_us else ""
        return f"{format_rate(self.rate)}/s, burst {self.burst} B, MTU {self.mtu}{delay}"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Emulated hosts on one machine.

    Attributes:
        name: ``taco0``, ``taco1``, ...
        hosts: How many.
        link: What joins them.
    """

    name: str
    hosts: int
    link: Link

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The network namespace of each host."""
        return tuple(f"{self.name}-h{host}" for host in range(self.hosts))

    @property
    def switch(self) -> str | None:
        """The namespace of the bridge; None for two hosts, which one veth pair joins."""
        return f"{self.name}-switch" if self.hosts > 2 else None

    @property
    def interface(self) -> str:
        """The name of the link's interface, the same inside every host."""
        return f"{self.name}-link"

    def port(self, host: int) -> str:
        """The name of the switch's interface towards a host."""
        return f"{self.name}-p{host}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host; it exists in the lab's namespaces only."""
        return f"10.77.0.{host + 1}"


@dataclass(frozen=True, kw_only=True)
class RankLink:
    """What a rank is told about its link.

    Attributes:
        link: The link.
        hosts: Emulated hosts.
        ranks_per_host: Ranks that share one host's link.
        shared_gpu: Whether all ranks are on one GPU.
    """

    link: Link
    hosts: int
    ranks_per_host: int
    shared_gpu: bool

    def dump(self) -> str:
        """Returns the text for ``LINK_VARIABLE``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Self | None:
        """Returns the link that the launcher stated, or None outside a lab."""
        text = os.environ.get(LINK_VARIABLE)
        if not text:
            return None
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Returns it from its fields, as a report holds them."""
        return cls(**{**data, "link": Link(**data["link"])})

    def crossing(self, size: int) -> int:
        """Returns the bytes that an all-to-all of ``size`` bytes a rank sends over one link."""
        ranks = self.hosts * self.ranks_per_host
        return self.ranks_per_host * size * (ranks - self.ranks_per_host) // ranks
