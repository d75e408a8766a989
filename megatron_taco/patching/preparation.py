"""What happens once, on all ranks alike, before the first step: kernels compile, `auto` measures.

By then the model exists, Megatron has loaded what it loads, and no CUDA graph has been captured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_taco.collectives import measure
from megatron_taco.collectives.policy import Measured
from megatron_taco.collectives.router import Message, Router
from megatron_taco.config.tensor_parallel import TensorParallel
from megatron_taco.patching.choice import choose
from megatron_taco.patching.errors import PatchError
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
        self._settle_group(group)
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

    def _settle_group(self, group: Any) -> None:
        """Find out how the group lies on nodes and GPUs: its ranks have to do that together."""
        try:
            self._router.nodes(group)
            self._router.require_peers(group, current_device())
        except ValueError as error:
            raise PatchError(f"compression.tensor_parallel.{error}") from error

    def _choose(
        self,
        args: argparse.Namespace,
        collectives: Sequence[str],
        messages: Messages,
        group: Any,
    ) -> None:
        policy = choose(
            args,
            facts(args, self._settings, messages),
            lambda: self._measure(collectives, messages, group),
            say=self._say,
            show=self._show,
            file=self._policy_file,
        )
        self._router.policy = policy
        if policy.all_plain:
            self._say("policy: every message goes plain; training goes on uncompressed")

    def _measure(
        self, collectives: Sequence[str], messages: Messages, group: Any
    ) -> list[Measured]:
        """Measure every flow's message."""
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
        return found
