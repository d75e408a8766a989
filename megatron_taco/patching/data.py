"""The data-parallel seam: Megatron's own reductions of gradients and gathers of weights.

Megatron keeps gradients and weights in flat buckets, and a bucket group starts one collective a
bucket in ``start_grad_sync`` and ``start_param_sync``. These look up as globals of their module
``dist_reduce_scatter_func``, ``dist_all_gather_func``, ``torch.distributed.all_reduce`` and
``_coalescing_manager``. Ours stand there all the time and pass everything on, but while a bucket
group that is to be compressed runs one of the two: then the bucket goes compressed, and instead of
torch's coalescing manager, which would put our messages off until after they had been decoded,
Megatron gets a list of our handles to wait for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.collectives import buckets, two_level
from megatron_taco.collectives.nodes import Topology
from megatron_taco.collectives.router import FlowCounter
from megatron_taco.collectives.traffic import Traffic
from megatron_taco.collectives.two_level import Nodes
from megatron_taco.compressors import Compressor
from megatron_taco.patching.data_changes import Changes
from megatron_taco.patching.data_flows import INSIDE_NODE
from megatron_taco.patching.data_methods import BucketMethods, Make
from megatron_taco.patching.data_plans import (
    ModelParameters,
    Plan,
    Plans,
    Stream,
    one_shot,
)
from megatron_taco.patching.overlay import Overlay
from megatron_taco.patching.registry import Registry
from megatron_taco.telemetry.costs import Cost

OWNER = "compression.data_parallel"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Hit = Callable[[], None]
Plain = Callable[[], Any]


class Handles:
    """What Megatron waits for instead of torch's coalescing manager; counts the time it takes."""

    def __init__(self, cost: Cost) -> None:
        self._handles: list[Any] = []
        self._cost = cost

    def append(self, handle: Any) -> None:
        """Add a handle under way; None, of a collective that is done, is left out."""
        if handle is not None:
            self._handles.append(handle)

    def wait(self) -> None:
        """Wait for all, in the order in which they were started."""
        handles, self._handles = self._handles, []
        with self._cost.timed():
            for handle in handles:
                handle.wait()


@dataclass
class _Sync:
    """A bucket group that starts its collectives now: what they are to become."""

    buckets: list[Any]
    plans: Plans
    compressed: bool
    handles: Handles


class _Current(threading.local):
    sync: _Sync | None = None


@dataclass(kw_only=True)
class DataParallelHooks:
    """Claims the targets of the data-parallel seam, and routes what passes there.

    Attributes:
        gradients: What is compressed of the gradients, or None.
        weights: What is compressed of the weights, or None.
        difference: Whether weights are sent as differences to what all ranks hold.
        inside_node: Compressor of a first hop inside each node, where a group spans nodes and has
            several ranks on each; None for one hop always.
        ranks_per_node: Ranks of a node; None to tell nodes by their host names.
        seed: Of random rounding.
        counter: Gives the counter of a role's collective.
        make_method: Makes the method with memory that takes gradients instead of a compressor.
        step: The step that runs now; the training loop sets it.
        sampling: Whether errors are sampled in this step.
    """

    gradients: Stream | None
    weights: Stream | None
    difference: bool
    inside_node: Compressor | None
    ranks_per_node: int | None
    seed: int
    counter: Callable[[str, str], FlowCounter]
    make_method: Make | None = None
    step: int = 0
    sampling: bool = False

    def __post_init__(self) -> None:
        """Start with nothing known of the model."""
        self.cost = Cost(OWNER, state=self._state_bytes)
        self.model = ModelParameters()
        self._current = _Current()
        self._gradient_plans = (
            Plans(self.gradients, self.model, lambda bucket: bucket.grad_data)
            if self.gradients
            else None
        )
        self._weight_plans = (
            Plans(self.weights, self.model, lambda bucket: bucket.param_data)
            if self.weights
            else None
        )
        self.methods: BucketMethods | None = None
        if self.gradients is not None and self.make_method is not None:
            self.methods = BucketMethods(self.gradients, self.model, self.make_method)
        self._models: list[weakref.ref[Any]] = []
        self._topology: Topology | None = None
        self._nodes: dict[Any, Nodes | None] = {}
        self._changes = Changes(self._weight_plans, self.difference) if self._weight_plans else None

    def _state_bytes(self) -> int:
        return 0 if self.methods is None else self.methods.state_bytes

    # What a bucket group does

    @contextlib.contextmanager
    def _syncing(self, members: Any, plans: Plans, compressed: bool) -> Iterator[None]:
        sync = _Sync(list(members), plans, compressed, Handles(self.cost))
        saved, self._current.sync = self._current.sync, sync
        try:
            with self.cost.timed() if compressed else contextlib.nullcontext():
                yield
        finally:
            self._current.sync = saved

    def _start_grad_sync(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            plans = self._gradient_plans
            if plans is None or not _is_ours(group, "grad_data"):
                return original(group, *args, **kwargs)
            hit()
            compressed = self.step >= plans.stream.start_step and any(
                plans.of(bucket).compresses for bucket in group.buckets
            )
            with self._syncing(group.buckets, plans, compressed):
                return original(group, *args, **kwargs)

        return start_grad_sync

    def _start_param_sync(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def start_param_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            plans = self._weight_plans
            if plans is None or not _is_ours(group, "param_data"):
                return original(group, *args, **kwargs)
            hit()
            assert self._changes is not None
            compressed = any(bucket in self._changes for bucket in group.buckets)
            with self._syncing(group.buckets, plans, compressed):
                return original(group, *args, **kwargs)

        return start_param_sync

    # What a collective becomes

    def _coalescing(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @contextlib.contextmanager
        def coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
            sync = self._current.sync
            if sync is None or not sync.compressed:
                with original(*args, **kwargs) as manager:
                    yield manager
                return
            hit()
            yield sync.handles

        return coalescing_manager

    def _find(self, tensor: Tensor, flat: str) -> tuple[_Sync, Any] | None:
        """The bucket whose flat tensor this is, if its group is being synchronised."""
        sync = self._current.sync
        if sync is not None:
            for bucket in sync.buckets:
                if getattr(bucket, flat) is tensor:
                    return sync, bucket
        return None

    def _run(
        self,
        sync: _Sync,
        plan: Plan,
        collective: str,
        group: ProcessGroup,
        async_op: bool,
        plain: Plain,
        compressed: Callable[[buckets.Codec, buckets.OnPart], Any] | None,
    ) -> Any:
        """Count a bucket, then send it one way or the other; returns Megatron's handle."""
        self._count(plan, collective, group, compressed is not None)
        if compressed is None:
            handle = plain()
        else:
            self.cost.called(plan.buffer_bytes(collective, group.rank(), group.size()))
            codec = plan.stream.codec(self.step, plan.name, dist.get_rank(), self.seed)
            handle = compressed(codec, self._observer(plan, collective))
            if not async_op:
                handle.wait()
                handle = None
        if sync.compressed and async_op:
            sync.handles.append(handle)
        return handle

    def _reduce_scatter(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def reduce_scatter_tensor(
            output: Tensor,
            input: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            def plain() -> Any:
                return original(output, input, op=op, group=group, async_op=async_op)

            found = self._find(input, "grad_data")
            if found is None or not _is_sum(op):
                return plain()
            hit()
            sync, bucket = found
            plan = sync.plans.of(bucket)
            if self.methods is not None and sync.compressed and plan.compresses:
                return self._by_method(bucket, plan, "reduce_scatter", group, op)
            nodes = self._nodes.get(group)
            if nodes is not None and sync.compressed and plan.compresses:
                return self._in_two_hops(output, input, nodes, sync, plan, op, async_op)

            def compressed(codec: buckets.Codec, on_part: buckets.OnPart) -> Any:
                return buckets.reduce_scatter(
                    output,
                    input,
                    slices=plan.slices(group.size(), equal=True),
                    group=group,
                    codec=codec,
                    average=op == dist.ReduceOp.AVG,
                    on_part=on_part,
                )

            send = compressed if sync.compressed and plan.compresses else None
            return self._run(sync, plan, "reduce_scatter", group, async_op, plain, send)

        return reduce_scatter_tensor

    def _in_two_hops(
        self,
        output: Tensor,
        input: Tensor,
        nodes: Nodes,
        sync: _Sync,
        plan: Plan,
        op: Any,
        async_op: bool,
    ) -> Any:
        assert self.inside_node is not None
        hops = plan.hops(nodes, self.inside_node)
        self.cost.called(hops.buffer_bytes)
        self._add(plan, INSIDE_NODE, hops.inside, True)
        self._add(plan, "reduce_scatter", hops.between, True)
        rank, stream = dist.get_rank(), plan.stream
        handle = two_level.reduce_scatter(
            output,
            input,
            nodes=nodes,
            fine=hops.fine,
            coarse=hops.coarse,
            fine_codec=stream.codec(
                self.step, f"{plan.name}:inside", rank, self.seed, self.inside_node
            ),
            coarse_codec=stream.codec(self.step, plan.name, rank, self.seed),
            average=op == dist.ReduceOp.AVG,
            on_fine=self._observer(plan, INSIDE_NODE),
            on_coarse=self._observer(plan, "reduce_scatter"),
        )
        if async_op:
            sync.handles.append(handle)
            return handle
        handle.wait()
        return None

    def _by_method(
        self, bucket: Any, plan: Plan, collective: str, group: ProcessGroup, op: Any
    ) -> None:
        """A bucket by its method with memory: done on return, so there is nothing to wait for."""
        assert self.methods is not None
        average = op == dist.ReduceOp.AVG
        self.cost.called(0 if bucket.grad_data.dtype == torch.float32 else 4 * plan.numel)
        sent, bad = self.methods.reduce(
            bucket, plan, collective, group, step=self.step, average=average
        )
        self._add(plan, collective, sent, True)
        name = plan.stream.method
        self.counter(f"{plan.stream.role}.{name}", collective).add_nonfinite(bad)

    def _all_reduce(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(
            tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            def plain() -> Any:
                return original(tensor, op=op, group=group, async_op=async_op)

            found = self._find(tensor, "grad_data")
            if found is None or not _is_sum(op):
                return plain()
            hit()
            sync, bucket = found
            plan = sync.plans.of(bucket)
            if self.methods is not None and sync.compressed and plan.compresses:
                return self._by_method(bucket, plan, "all_reduce", group, op)
            size = group.size()

            def compressed(codec: buckets.Codec, on_part: buckets.OnPart) -> Any:
                return buckets.all_reduce(
                    tensor,
                    slices=plan.slices(1 if one_shot(size) else size, equal=False),
                    group=group,
                    codec=codec,
                    average=op == dist.ReduceOp.AVG,
                    on_part=on_part,
                )

            send = compressed if sync.compressed and plan.compresses else None
            return self._run(sync, plan, "all_reduce", group, async_op, plain, send)

        return all_reduce

    def _torch(self, original: Any, hit: Hit) -> Any:
        """A ``torch`` whose ``distributed.all_reduce`` is routed; all else is the original's."""
        distributed = original.distributed
        routed = self._all_reduce(lambda *a, **k: distributed.all_reduce(*a, **k), hit)
        return Overlay(original, distributed=Overlay(distributed, all_reduce=routed))

    def _all_gather(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_gather_into_tensor(
            output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
        ) -> Any:
            def plain() -> Any:
                return original(output_tensor, input_tensor, group=group, async_op=async_op)

            found = self._find(output_tensor, "param_data")
            if found is None:
                return plain()
            hit()
            sync, bucket = found
            plan = sync.plans.of(bucket)
            assert self._changes is not None
            changes = self._changes.take(bucket)

            def compressed(codec: buckets.Codec, on_part: buckets.OnPart) -> Any:
                assert changes is not None
                return buckets.all_gather_changes(
                    output_tensor,
                    changes,
                    slices=plan.slices(group.size(), equal=True),
                    group=group,
                    codec=codec,
                    add=self.difference,
                    on_part=on_part,
                )

            send = compressed if changes is not None else None
            return self._run(sync, plan, "all_gather", group, async_op, plain, send)

        return all_gather_into_tensor

    # What is counted

    def _count(self, plan: Plan, collective: str, group: ProcessGroup, compressed: bool) -> None:
        sent = plan.traffic(collective, group.rank(), group.size(), compressed)
        self._add(plan, collective, sent, compressed)

    def _add(self, plan: Plan, collective: str, sent: dict[str, Traffic], compressed: bool) -> None:
        size = plan.numel * plan.itemsize
        stream = plan.stream
        for kind, traffic in stream.counted(sent).items():
            count = self.counter(f"{stream.role}.{kind}", collective)
            count.seen += 1
            count.largest = max(count.largest, size)
            count.raw += traffic.raw
            count.wire += traffic.wire
            if not stream.is_exact(kind):
                count.compressed += int(compressed)
                count.small += int(not compressed and size < stream.min_bytes)

    def _observer(self, plan: Plan, collective: str) -> buckets.OnPart:
        def on_part(kind: str, values: Tensor, payload: Tensor, compressor: Compressor) -> None:
            count = self.counter(f"{plan.stream.role}.{kind}", collective)
            count.add_nonfinite(compressor.nonfinite_blocks(payload, values.numel()))
            if self.sampling:
                decoded = compressor.decode_rows(payload, values.numel(), torch.float32)
                count.add_error(values.float(), decoded[0])

        return on_part

    # What the optimiser and the model tell

    def _copy_main_params(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def copy_main_params(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            weights = self._changes
            if weights is None or optimizer.is_stub_optimizer:
                return original(optimizer, *args, **kwargs)
            hit()
            if self.step < weights.plans.stream.start_step:
                return original(optimizer, *args, **kwargs)
            with self.cost.timed(), weights.kept(optimizer, self._count_exact_gather):
                result = original(optimizer, *args, **kwargs)
            self.cost.buffers = max(self.cost.buffers, weights.kept_bytes)
            return result

        return copy_main_params

    def _count_exact_gather(self, plan: Plan, group: ProcessGroup) -> None:
        self._count(plan, "all_gather", group, False)

    def _ddp_init(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:
            hit()
            original(ddp, *args, **kwargs)
            from megatron.core import parallel_state

            size = parallel_state.get_tensor_model_parallel_world_size()
            self.model.learn(ddp.module, size)
            self._models.append(weakref.ref(ddp))
            if self.inside_node is not None:
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                if group not in self._nodes:
                    self._nodes[group] = two_level.nodes_of(group, self._node())

        return __init__

    def method_buckets(self) -> Iterator[tuple[Any, Plan, ProcessGroup]]:
        """Every bucket that goes by a method with memory, with its plan and its group."""
        assert self._gradient_plans is not None
        for reference in self._models:
            ddp = reference()
            for bucket_group in [] if ddp is None else ddp.bucket_groups:
                if not _is_ours(bucket_group, "grad_data"):
                    continue
                for bucket in bucket_group.buckets:
                    plan = self._gradient_plans.of(bucket)
                    if plan.compresses:
                        yield bucket, plan, _group_of(bucket_group)

    def _node(self) -> Topology:
        if self._topology is None:
            count = self.ranks_per_node
            self._topology = Topology(None if count is None else str(dist.get_rank() // count))
        return self._topology

    def claim(self, registry: Registry) -> None:
        """Claim all targets; nothing is replaced until the registry is applied."""
        claims: dict[str, Callable[[Any, Hit], Any]] = {
            "data.ddp_init": self._ddp_init,
            "data.coalescing_manager": self._coalescing,
        }
        if self.gradients is not None:
            claims["data.start_grad_sync"] = self._start_grad_sync
            claims["data.reduce_scatter"] = self._reduce_scatter
            claims["data.torch"] = self._torch
        if self.weights is not None:
            claims["data.start_param_sync"] = self._start_param_sync
            claims["data.all_gather"] = self._all_gather
            claims["data.copy_main_params"] = self._copy_main_params
        for name, replacement in claims.items():
            registry.claim(name, OWNER, replacement)


def _is_sum(op: Any) -> bool:
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def _is_ours(group: Any, flat: str) -> bool:
    """Tell whether a bucket group has more than one rank, and no expert or special bucket."""
    return _group_of(group).size() > 1 and all(
        getattr(bucket, flat) is not None
        and getattr(bucket, flat).dtype in _DTYPES
        and all(getattr(parameter, "allreduce", True) for parameter in bucket.params)
        for bucket in group.buckets
    )


def _group_of(group: Any) -> ProcessGroup:
    """The ranks over which a bucket group reduces and gathers."""
    ranks: ProcessGroup
    if group.ddp_config.use_distributed_optimizer:
        ranks = group.intra_distributed_optimizer_instance_group
    else:
        ranks = group.data_parallel_group
    return ranks
