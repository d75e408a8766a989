"""What happens once, on all ranks alike, before the first step: kernels compile, `auto` measures.

By then the model exists, Megatron has loaded what it loads, and no CUDA graph has been captured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from megatron_taco.collectives import measure
from megatron_taco.collectives.policy import Fact, Measured, Policy
from megatron_taco.collectives.router import Message, Router
from megatron_taco.config.tensor_parallel import TensorParallel
from megatron_taco.patching import stored_policy
from megatron_taco.patching.errors import PatchError
from megatron_taco.patching.policy_table import explanations, policy_table
from megatron_taco.patching.run_facts import Messages, current_device, facts
from megatron_taco.patching.warm_up import compile_kernels
from megatron_taco.telemetry.counters import Flow


class Preparation:
    """Makes a router ready for the run's messages.

    Args:
        router: the router; ``auto`` sets its policy.
        settings: the section ``compression.tensor_parallel``.
        flows: the flows of the roles that are on.
        sampling: whether the codec's error will be sampled.
        policy_file: where rank 0 keeps the policy, or None.
        say: prints a line from rank 0.
        show: prints a table from rank 0.
        knows_messages: whether Megatron's arguments, which tell the messages' size, are there; else
            kernels compile when they are first used.
    """

    def __init__(
        self,
        *,
        router: Router,
        settings: TensorParallel,
        flows: Sequence[Flow],
        sampling: bool,
        policy_file: Path | None,
        say: Callable[[str], None],
        show: Callable[[Table], None],
        knows_messages: bool = True,
    ) -> None:
        self._router = router
        self._settings = settings
        self._flows = flows
        self._sampling = sampling
        self._policy_file = policy_file
        self._say = say
        self._show = show
        self._knows_messages = knows_messages

    def run(self) -> None:
        """Compile and, under ``auto``, choose; a collective call of all ranks."""
        from megatron.core import parallel_state
        from megatron.training import get_args

        group = parallel_state.get_tensor_model_parallel_group()
        self._settle_nodes(group)
        if not self._knows_messages:
            return
        args = get_args()
        messages = Messages.of(args)
        collectives = tuple(dict.fromkeys(flow.collective for flow in self._flows))
        device = current_device()
        if device.type == "cuda" and messages.largest_bytes >= self._router.min_bytes:
            sampling = self._sampling
            self._say(
                compile_kernels(
                    self._router, collectives, messages, group, device, sampling=sampling
                )
            )
        if self._settings.mode == "auto":
            self._choose(args, collectives, messages, group)

    def _settle_nodes(self, group: Any) -> None:
        """Find out how the group lies on nodes now: its ranks have to do that together."""
        try:
            self._router.nodes(group)
        except ValueError as error:
            raise PatchError(f"compression.tensor_parallel.{error}") from error

    def _choose(
        self,
        args: argparse.Namespace,
        collectives: Sequence[str],
        messages: Messages,
        group: Any,
    ) -> None:
        now = facts(args, self._settings, messages)
        policy, remark = self._stored(args, now)
        if remark:
            self._say(remark)
        if policy is None:
            policy = Policy(tuple(self._measure(collectives, messages, group)), now)
            if policy.measured:
                self._show(policy_table(policy, "What the links take (medians, slowest rank)"))
            for line in explanations(policy):
                self._say(line)
        self._router.policy = policy
        stored_policy.keep(policy, args)
        if dist.get_rank() == 0 and self._policy_file is not None:
            policy.save(self._policy_file)
        if policy.all_plain:
            self._say("policy: every message goes plain; training goes on uncompressed")

    @staticmethod
    def _stored(args: argparse.Namespace, now: dict[str, Fact]) -> tuple[Policy | None, str | None]:
        """The policy of the checkpoint, if it holds for this run, and what is to be said.

        Rank 0 reads it and tells the others, so that all ranks have the same.
        """
        folder = stored_policy.resumed_from(args)
        if folder is None:
            return None, None
        said: list[Any] = [None]
        if dist.get_rank() == 0:
            stored, why = stored_policy.read(folder)
            if stored is None:
                said = [(None, f"policy measured anew: {why}")]
            elif changed := stored.differences(now):
                said = [
                    (
                        None,
                        f"policy measured anew: {', '.join(changed)}; this run is not "
                        "bit-comparable with the one it resumes",
                    )
                ]
            else:
                said = [(stored.to_dict(), "policy: as in the checkpoint, not measured again")]
        dist.broadcast_object_list(said, src=0, device=current_device())
        record, remark = said[0]
        return None if record is None else Policy.from_dict(record), remark

    def _measure(
        self, collectives: Sequence[str], messages: Messages, group: Any
    ) -> list[Measured]:
        """Measure every flow's message; rank 0 decides for all."""
        device, router = current_device(), self._router
        nbytes = messages.training * messages.dtype.itemsize
        if nbytes < router.min_bytes:
            self._say(
                f"policy: nothing to measure: the messages are {nbytes} bytes, below min_bytes "
                f"{router.min_bytes} bytes, and go plain"
            )
            return []
        times = {
            collective: measure.time_pair(
                collective,
                numel=messages.training,
                dtype=messages.dtype,
                device=device,
                group=group,
                plain=measure.plain_send,
                compressed=router.send_checked,
            )
            for collective in collectives
        }
        found = []
        for flow in self._flows:
            sent = router.traffic(Message(*flow, messages.training, messages.dtype.itemsize, group))
            plain_s, compressed_s = times[flow.collective]
            found.append(
                Measured(
                    role=flow.role,
                    collective=flow.collective,
                    nbytes=nbytes,
                    raw=sent.raw,
                    wire=sent.wire,
                    plain_s=plain_s,
                    compressed_s=compressed_s,
                ).decided()
            )
        return self._as_rank_0(found, device)

    @staticmethod
    def _as_rank_0(found: list[Measured], device: torch.device) -> list[Measured]:
        said: list[Any] = [Policy(tuple(found), {}).to_dict()]
        dist.broadcast_object_list(said, src=0, device=device)
        return list(Policy.from_dict(said[0]).measured)
