"""All ranks run the same configuration, or none does (contract 8 of the design)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping

import torch.distributed as dist

from megatron_taco.config import ConfigError, diff
from megatron_taco.training.launch_env import Ranks

Canonical = Mapping[str, str | int | float | bool | None]


START_TIMEOUT = datetime.timedelta(minutes=5)


def agree(
    store: dist.Store,
    ranks: Ranks,
    canonical: Canonical,
    what: str,
    timeout: datetime.timedelta = START_TIMEOUT,
) -> None:
    """Compare what this rank has with what rank 0 has, through the store.

    No process group is needed.  Every rank raises alike, so that none is left waiting.

    Args:
        store: the rendezvous store of the run.
        ranks: this rank and their number.
        canonical: flat dotted keys, without host and folder fields.
        what: what is compared (``configuration``); each kind is compared once.
        timeout: how long to wait for the other ranks.

    Raises:
        ConfigError: naming the ranks that differ from rank 0 and the keys, or the ranks that did
            not answer in time.
    """
    store = dist.PrefixStore(f"megatron_taco/{what}", store)
    store.set(str(ranks.rank), json.dumps(dict(canonical), sort_keys=True))
    missing, answers = [], {}
    deadline = datetime.datetime.now() + timeout
    for other in range(ranks.world_size):
        left = max(deadline - datetime.datetime.now(), datetime.timedelta(milliseconds=100))
        try:
            store.wait([str(other)], left)
            answers[other] = json.loads(store.get(str(other)))
        except dist.DistStoreError:
            missing.append(other)
    if missing:
        raise ConfigError(
            f"ranks {', '.join(map(str, missing))} did not report their {what} within "
            f"{timeout.total_seconds():.0f} s; did they start?"
        )
    lines = [
        f"rank {other} differs from rank 0: {difference}"
        for other, answer in answers.items()
        for difference in diff(answers[0], answer)
    ]
    if lines:
        raise ConfigError(f"the ranks of one run must have the same {what}\n" + "\n".join(lines))
    # Nobody leaves (and takes the store along) before everybody has read all answers.
    store.set(f"done/{ranks.rank}", "1")
    store.wait([f"done/{other}" for other in range(ranks.world_size)], timeout)
