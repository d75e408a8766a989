"""What the collectives of a data-parallel bucket become: compressed, a method's, or Megatron's own.

``reduce_scatter``, ``all_reduce`` and ``all_gather`` wrap the functions that a bucket group calls.
A tensor that is no bucket of a group that is being synchronised goes the original way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import buckets, two_level
from megatron_taco.collectives.nodes import Topology
from megatron_taco.collectives.two_level import Nodes
from megatron_taco.compressors import Compressor
from megatron_taco.patching.data_changes import Changes
from megatron_taco.patching.data_counts import BucketCounts
from megatron_taco.patching.data_flows import INSIDE_NODE
from megatron_taco.patching.data_methods import BucketMethods
from megatron_taco.patching.data_plans import Hops, Plan, one_shot
from megatron_taco.patching.data_sync import Moment, Sync, Syncing
from megatron_taco.patching.overlay import Overlay
from megatron_taco.telemetry.costs import Cost

Hit = Callable[[], None]
Plain = Callable[[], Any]
Send = Callable[[buckets.Codec, buckets.OnPart], Any]


class BucketSends:
    """Sends buckets.

    Args:
        syncing: The bucket group that is being synchronised.
        moment: The step that runs.
        counts: Counts what is sent.
        cost: Of the axis.
        seed: Of random rounding.
        methods: Gradient methods with memory, where they take the buckets.
        changes: Of the weights, where these are sent.
        difference: Whether weights are sent as differences.
        inside_node: Compressor of a first hop inside each node, or None.
        ranks_per_node: Ranks of a node; None to tell nodes by their host names.
    """

    def __init__(
        self,
        syncing: Syncing,
        moment: Moment,
        counts: BucketCounts,
        cost: Cost,
        *,
        seed: int,
        methods: BucketMethods | None,
        changes: Changes | None,
        difference: bool,
        inside_node: Compressor | None,
        ranks_per_node: int | None,
    ) -> None:
        self._syncing = syncing
        self._moment = moment
        self._counts = counts
        self._cost = cost
        self._seed = seed
        self._methods = methods
        self._changes = changes
        self._difference = difference
        self._inside_node = inside_node
        self._ranks_per_node = ranks_per_node
        self._topology: Topology | None = None
        self._nodes: dict[Any, Nodes | None] = {}

    def settle(self, group: ProcessGroup) -> None:
        """Find out how a group lies on nodes; its ranks have to do that together."""
        if self._inside_node is None or group in self._nodes:
            return
        if self._topology is None:
            count = self._ranks_per_node
            self._topology = Topology(None if count is None else str(dist.get_rank() // count))
        self._nodes[group] = two_level.nodes_of(group, self._topology)

    # One bucket, compressed: each returns a handle to wait for.

    def reduce_scattered(
        self,
        output: Tensor,
        input: Tensor,
        plan: Plan,
        group: ProcessGroup,
        average: bool,
        on_part: Callable[[str], buckets.OnPart],
    ) -> Any:
        """Reduce-scatter a bucket [N] into this rank's slice, in one hop or in two.

        Args:
            output: This rank's slice.
            input: The bucket.
            plan: Of the bucket.
            group: The group.
            average: Divide the sum by the size of the group.
            on_part: Gives what sees the payloads of a collective, or of the hop inside a node.
        """
        codec, hops = self._codec(plan), self.hops(plan, group)
        if hops is None:
            slices = plan.slices(group.size(), equal=True)
            return buckets.reduce_scatter(
                output,
                input,
                slices=slices,
                group=group,
                codec=codec,
                average=average,
                on_part=on_part("reduce_scatter"),
            )
        return two_level.reduce_scatter(
            output,
            input,
            nodes=hops.nodes,
            fine=hops.fine,
            coarse=hops.coarse,
            fine_codec=self._codec(plan, ":inside", self._inside_node),
            coarse_codec=codec,
            average=average,
            on_fine=on_part(INSIDE_NODE),
            on_coarse=on_part("reduce_scatter"),
        )

    def all_reduced(
        self, tensor: Tensor, plan: Plan, group: ProcessGroup, average: bool, see: buckets.OnPart
    ) -> Any:
        """All-reduce a bucket [N] in place."""
        size = group.size()
        return buckets.all_reduce(
            tensor,
            slices=plan.slices(1 if one_shot(size) else size, equal=False),
            group=group,
            codec=self._codec(plan),
            average=average,
            on_part=see,
        )

    def gathered(
        self, bucket: Tensor, changes: Tensor, plan: Plan, group: ProcessGroup, see: buckets.OnPart
    ) -> Any:
        """Bring a bucket [N] of weights up to date by FP32 changes of this rank's slice."""
        return buckets.all_gather_changes(
            bucket,
            changes,
            slices=plan.slices(group.size(), equal=True),
            group=group,
            codec=self._codec(plan),
            add=self._difference,
            on_part=see,
        )

    def _codec(
        self, plan: Plan, hop: str = "", compressor: Compressor | None = None
    ) -> buckets.Codec:
        name, step = f"{plan.name}{hop}", self._moment.step
        return plan.stream.codec(step, name, dist.get_rank(), self._seed, compressor)

    def hops(self, plan: Plan, group: ProcessGroup) -> Hops | None:
        """Return the layouts of a reduce-scatter in two hops, or None where it takes one."""
        nodes = self._nodes.get(group)
        if nodes is None or self._inside_node is None:
            return None
        return plan.hops(nodes, self._inside_node)

    # What Megatron calls

    def reduce_scatter(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        """Wrap ``dist_reduce_scatter_func``."""

        @functools.wraps(original)
        def reduce_scatter_tensor(
            output: Tensor,
            input: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            found = self._syncing.find(input, "grad_data")
            if found is None or not _is_sum(op):
                return original(output, input, op=op, group=group, async_op=async_op)
            hit()
            sync, bucket = found
            plan = sync.plans.of(bucket)
            if not (sync.compressed and plan.compresses):
                self._counts.bucket(plan, "reduce_scatter", group, False)
                handle = original(output, input, op=op, group=group, async_op=async_op)
                return self._under_way(handle, sync, async_op)
            average = op == dist.ReduceOp.AVG
            if self._methods is not None:
                return self._by_method(bucket, plan, "reduce_scatter", group, average)
            self._count_reduce_scatter(plan, group)
            handle = self.reduce_scattered(
                output, input, plan, group, average, functools.partial(self._counts.observer, plan)
            )
            return self._sent(handle, sync, async_op)

        return reduce_scatter_tensor

    def _count_reduce_scatter(self, plan: Plan, group: ProcessGroup) -> None:
        hops = self.hops(plan, group)
        if hops is None:
            self._cost.called(plan.buffer_bytes("reduce_scatter", group.rank(), group.size()))
            self._counts.bucket(plan, "reduce_scatter", group, True)
            return
        self._cost.called(hops.buffer_bytes)
        self._counts.add(plan, INSIDE_NODE, hops.inside, True)
        self._counts.add(plan, "reduce_scatter", hops.between, True)

    def _by_method(
        self, bucket: Any, plan: Plan, collective: str, group: ProcessGroup, average: bool
    ) -> None:
        """A bucket by its method with memory: done on return, so there is nothing to wait for."""
        assert self._methods is not None
        self._cost.called(0 if bucket.grad_data.dtype == torch.float32 else 4 * plan.numel)
        sent, bad = self._methods.reduce(
            bucket, plan, collective, group, step=self._moment.step, average=average
        )
        self._counts.add(plan, collective, sent, True)
        self._counts.nonfinite(plan, collective, bad)

    def _all_reduce(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(
            tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            found = self._syncing.find(tensor, "grad_data")
            if found is None or not _is_sum(op):
                return original(tensor, op=op, group=group, async_op=async_op)
            hit()
            sync, bucket = found
            plan = sync.plans.of(bucket)
            if not (sync.compressed and plan.compresses):
                self._counts.bucket(plan, "all_reduce", group, False)
                handle = original(tensor, op=op, group=group, async_op=async_op)
                return self._under_way(handle, sync, async_op)
            average = op == dist.ReduceOp.AVG
            if self._methods is not None:
                return self._by_method(bucket, plan, "all_reduce", group, average)
            self._counts.bucket(plan, "all_reduce", group, True)
            self._cost.called(plan.buffer_bytes("all_reduce", group.rank(), group.size()))
            see = self._counts.observer(plan, "all_reduce")
            return self._sent(self.all_reduced(tensor, plan, group, average, see), sync, async_op)

        return all_reduce

    def torch(self, original: Any, hit: Hit) -> Any:
        """A ``torch`` whose ``distributed.all_reduce`` is routed; all else is the original's."""
        distributed = original.distributed
        routed = self._all_reduce(lambda *a, **k: distributed.all_reduce(*a, **k), hit)
        return Overlay(original, distributed=Overlay(distributed, all_reduce=routed))

    def all_gather(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        """Wrap ``dist_all_gather_func``."""

        @functools.wraps(original)
        def all_gather_into_tensor(
            output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
        ) -> Any:
            found = self._syncing.find(output_tensor, "param_data")
            if found is None:
                return original(output_tensor, input_tensor, group=group, async_op=async_op)
            hit()
            sync, bucket = found
            plan = sync.plans.of(bucket)
            assert self._changes is not None
            changes = self._changes.take(bucket)
            self._counts.bucket(plan, "all_gather", group, changes is not None)
            if changes is None:
                handle = original(output_tensor, input_tensor, group=group, async_op=async_op)
                return self._under_way(handle, sync, async_op)
            self._cost.called(plan.buffer_bytes("all_gather", group.rank(), group.size()))
            see = self._counts.observer(plan, "all_gather")
            return self._sent(
                self.gathered(output_tensor, changes, plan, group, see), sync, async_op
            )

        return all_gather_into_tensor

    @staticmethod
    def _under_way(handle: Any, sync: Sync, async_op: bool) -> Any:
        """Have Megatron wait for a plain collective where torch's manager does not."""
        if sync.compressed and async_op:
            sync.handles.append(handle)
        return handle

    def _sent(self, handle: Any, sync: Sync, async_op: bool) -> Any:
        """Wait for a compressed collective now, or have Megatron wait for it later."""
        if not async_op:
            handle.wait()
            return None
        return self._under_way(handle, sync, async_op)


def _is_sum(op: Any) -> bool:
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
