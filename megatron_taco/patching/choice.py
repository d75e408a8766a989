"""The policy of an axis under `auto`: the checkpoint's if it still holds, else measured now."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from megatron_taco.collectives.policy import Fact, Measured, Policy
from megatron_taco.patching import stored_policy
from megatron_taco.patching.policy_table import explanations, policy_table
from megatron_taco.patching.run_facts import current_device


def choose(
    args: argparse.Namespace,
    facts: Mapping[str, Fact],
    measure: Callable[[], list[Measured]],
    *,
    say: Callable[[str], None],
    show: Callable[[Table], None],
    file: Path | None,
    name: str = "policy",
    attribute: str = stored_policy.ATTRIBUTE,
) -> Policy:
    """Choose what goes compressed, the same on all ranks; a collective call of the world.

    Args:
        args: Megatron's arguments after it has loaded; the policy is kept with them.
        facts: what measurements hold for.
        measure: measures; every rank calls it alike, and rank 0's decisions count.
        say: prints a line from rank 0.
        show: prints a table from rank 0.
        file: where rank 0 keeps the policy, or None.
        name: of the policy, in what is printed.
        attribute: of the arguments, which has the policy in checkpoints.
    """
    policy, remark = _stored(args, facts, name, attribute)
    if remark:
        say(remark)
    if policy is None:
        policy = Policy(_as_rank_0(measure()), dict(facts))
        if policy.measured:
            title = f"{name}: what the links take (medians, slowest rank)"
            show(policy_table(policy, title[0].upper() + title[1:]))
        for line in explanations(policy):
            say(line)
    stored_policy.keep(policy, args, attribute)
    if dist.get_rank() == 0 and file is not None:
        policy.save(file)
    return policy


def _stored(
    args: argparse.Namespace, now: Mapping[str, Fact], name: str, attribute: str
) -> tuple[Policy | None, str | None]:
    """The policy of the checkpoint, if it holds for this run, and what is to be said.

    Rank 0 reads it and tells the others, so that all ranks have the same.
    """
    folder = stored_policy.resumed_from(args)
    if folder is None:
        return None, None
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        stored, why = stored_policy.read(folder, attribute)
        if stored is None:
            said = [(None, f"{name} measured anew: {why}")]
        elif changed := stored.differences(now):
            said = [
                (
                    None,
                    f"{name} measured anew: {', '.join(changed)}; this run is not "
                    "bit-comparable with the one it resumes",
                )
            ]
        else:
            said = [(stored.to_dict(), f"{name}: as in the checkpoint, not measured again")]
    dist.broadcast_object_list(said, src=0, device=current_device())
    record, remark = said[0]
    return None if record is None else Policy.from_dict(record), remark


def _as_rank_0(found: list[Measured]) -> tuple[Measured, ...]:
    said: list[Any] = [Policy(tuple(found), {}).to_dict()]
    dist.broadcast_object_list(said, src=0, device=current_device())
    return Policy.from_dict(said[0]).measured
