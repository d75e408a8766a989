"""All ranks run the same configuration, or none does (contract 8 of the design)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping

import torch.distributed as dist

from megatron_taco.config import ConfigError, diff

Canonical = Mapping[str, str | int | float | bool | None]


def agree(
    store: dist.Store,
    rank: int,
    world_size: int,
    canonical: Canonical,
    timeout: datetime.timedelta = datetime.timedelta(minutes=5),
) -> None:
    """Compare this rank's resolved configuration with rank 0's through the store.

    No process group is needed.  Every rank raises alike, so that none is left waiting.

    Args:
        store: the rendezvous store of the run.
        rank: this rank.
        world_size: number of ranks.
        canonical: flat dotted keys of the configuration, without host and folder fields.
        timeout: how long to wait for the other ranks.

    Raises:
        ConfigError: naming the ranks that differ from rank 0 and the keys, or the ranks that did
            not answer in time.
    """
    store = dist.PrefixStore("megatron_taco/config", store)
    store.set(str(rank), json.dumps(dict(canonical), sort_keys=True))
    missing, answers = [], {}
    deadline = datetime.datetime.now() + timeout
    for other in range(world_size):
        left = max(deadline - datetime.datetime.now(), datetime.timedelta(milliseconds=100))
        try:
            store.wait([str(other)], left)
            answers[other] = json.loads(store.get(str(other)))
        except dist.DistStoreError:
            missing.append(other)
    if missing:
        raise ConfigError(
            f"ranks {', '.join(map(str, missing))} did not report a configuration within "
            f"{timeout.total_seconds():.0f} s; did they start?"
        )
    lines = [
        f"rank {other} differs from rank 0: {difference}"
        for other, answer in answers.items()
        for difference in diff(answers[0], answer)
    ]
    if lines:
        raise ConfigError(
            "the ranks of one run must have the same configuration\n" + "\n".join(lines)
        )
    # Nobody leaves (and takes the store along) before everybody has read all answers.
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(world_size)], timeout)
