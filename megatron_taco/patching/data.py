"""The data-parallel seam: Megatron's own reductions of gradients and gathers of weights.

Megatron keeps gradients and weights in flat buckets, and a bucket group starts one collective a
bucket in ``start_grad_sync`` and ``start_param_sync``. These look up as globals of their module
``dist_reduce_scatter_func``, ``dist_all_gather_func``, ``torch.distributed.all_reduce`` and
``_coalescing_manager``. Ours stand there all the time and pass everything on, but while a bucket
group that is to be compressed runs one of the two: then the bucket goes compressed, and instead of
torch's coalescing manager, which would put our messages off until after they had been decoded,
Megatron gets a list of our handles to wait for.

Weights (SDP4Bit, arXiv 2410.15526): after the optimiser has written its FP32 master weights W into
this rank's slice, rounded, that slice is put back to what all ranks hold, V, and W - V is kept; the
gather then sends Q(W - V), and every rank, the owner too, makes V <- round(V + Q(W - V)). So V is
Megatron's own parameter buffer, nothing has to be saved besides it, and errors do not pile up: what
one step rounds away is in the next difference. V is made equal on all ranks by one exact gather
before the first such step of a process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

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
from megatron_taco.patching.data_plans import (
    GRADIENTS,
    WEIGHTS,
    ModelParameters,
    Plan,
    Plans,
    Stream,
    one_shot,
)
from megatron_taco.patching.parameter_kinds import KINDS
from megatron_taco.patching.registry import Registry
from megatron_taco.patching.tensor import _Overlay
from megatron_taco.telemetry.counters import Flow

OWNER = "compression.data_parallel"
INSIDE_NODE = "inside_node"
"""The first hop of a reduce-scatter in two; the second is counted as the reduce-scatter."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Hit = Callable[[], None]
Plain = Callable[[], Any]


def all_flows() -> list[Flow]:
    """Every flow this seam can count, in report order."""
    gradients = [
        Flow(f"{GRADIENTS}.{kind}", collective)
        for collective in ("reduce_scatter", INSIDE_NODE, "all_reduce")
        for kind in KINDS
    ]
    return gradients + [Flow(f"{WEIGHTS}.{kind}", "all_gather") for kind in KINDS]


def expected_flows(stream: Stream, *, distributed_optimizer: bool) -> list[Flow]:
    """The flows that must happen in a training step of a GPT over several data-parallel ranks.

    Args:
        stream: Of gradients or of weights.
        distributed_optimizer: Whether gradients are reduce-scattered.
    """
    collective = "all_reduce"
    if distributed_optimizer:
        collective = "reduce_scatter" if stream.role == GRADIENTS else "all_gather"
    kinds = [kind for kind in ("attention", "mlp") if not stream.is_exact(kind)]
    return [Flow(f"{stream.role}.{kind}", collective) for kind in kinds]


class Handles:
    """What Megatron waits for instead of torch's coalescing manager."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def append(self, handle: Any) -> None:
        """Add a handle under way; None, of a collective that is done, is left out."""
        if handle is not None:
            self._handles.append(handle)

    def wait(self) -> None:
        """Wait for all, in the order in which they were started."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()


@dataclass
class _Sync:
    """A bucket group that starts its collectives now: what they are to become."""

    buckets: list[Any]
    plans: Plans
    compressed: bool
    handles: Handles = field(default_factory=Handles)


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
    step: int = 0
    sampling: bool = False

    def __post_init__(self) -> None:
        """Start with nothing known of the model."""
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
        self._topology: Topology | None = None
        self._nodes: dict[Any, Nodes | None] = {}
        self._changes: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self._made_equal: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    # What a bucket group does

    @contextlib.contextmanager
    def _syncing(self, sync: _Sync) -> Iterator[None]:
        saved, self._current.sync = self._current.sync, sync
        try:
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
            with self._syncing(_Sync(list(group.buckets), plans, compressed)):
                return original(group, *args, **kwargs)

        return start_grad_sync

    def _start_param_sync(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def start_param_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            plans = self._weight_plans
            if plans is None or not _is_ours(group, "param_data"):
                return original(group, *args, **kwargs)
            hit()
            compressed = any(bucket in self._changes for bucket in group.buckets)
            with self._syncing(_Sync(list(group.buckets), plans, compressed)):
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
        return _Overlay(original, distributed=_Overlay(distributed, all_reduce=routed))

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
            changes = self._changes.pop(bucket, None)

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
        for kind, traffic in sent.items():
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
            plans = self._weight_plans
            if plans is None or optimizer.is_stub_optimizer:
                return original(optimizer, *args, **kwargs)
            hit()
            if self.step < plans.stream.start_step:
                return original(optimizer, *args, **kwargs)
            masters = _masters(optimizer, plans)
            group = optimizer.data_parallel_group
            before = {
                bucket: self._own_slice_before(plans.of(bucket), bucket, group)
                for bucket in masters
            }
            result = original(optimizer, *args, **kwargs)
            for bucket, pieces in masters.items():
                self._keep_changes(plans.of(bucket), bucket, pieces, before[bucket], group)
            return result

        return copy_main_params

    def _own_slice_before(self, plan: Plan, bucket: Any, group: ProcessGroup) -> Tensor:
        """This rank's slice as all ranks hold it, which the first time is made sure of."""
        own = _own_slice(bucket.param_data, group)
        if bucket not in self._made_equal:
            dist.all_gather_into_tensor(bucket.param_data, own.clone(), group=group)
            self._count(plan, "all_gather", group, False)
            self._made_equal[bucket] = True
        return own.clone()

    def _keep_changes(
        self,
        plan: Plan,
        bucket: Any,
        pieces: list[tuple[int, Tensor]],
        before: Tensor,
        group: ProcessGroup,
    ) -> None:
        own = _own_slice(bucket.param_data, group)
        changes = torch.zeros_like(own, dtype=torch.float32)
        start = group.rank() * own.numel()
        for place, master in pieces:
            changes[place - start : place - start + master.numel()] = master.detach().view(-1)
        if self.difference:
            changes -= before.float()
        mine = plan.slices(group.size(), equal=True)[group.rank()]
        for part in mine.parts:
            if not part.exact:
                for first, last in part.spans:
                    own[first - start : last - start] = before[first - start : last - start]
        self._changes[bucket] = changes

    def _ddp_init(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:
            hit()
            original(ddp, *args, **kwargs)
            from megatron.core import parallel_state

            size = parallel_state.get_tensor_model_parallel_world_size()
            self.model.learn(ddp.module, size)
            if self.inside_node is not None:
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                if group not in self._nodes:
                    self._nodes[group] = two_level.nodes_of(group, self._node())

        return __init__

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
    config = group.ddp_config
    if config.use_distributed_optimizer:
        ranks = group.intra_distributed_optimizer_instance_group
    else:
        ranks = group.data_parallel_group
    return ranks.size() > 1 and all(
        getattr(bucket, flat) is not None
        and getattr(bucket, flat).dtype in _DTYPES
        and all(getattr(parameter, "allreduce", True) for parameter in bucket.params)
        for bucket in group.buckets
    )


def _own_slice(flat: Tensor, group: ProcessGroup) -> Tensor:
    width = flat.numel() // group.size()
    return flat[group.rank() * width : (group.rank() + 1) * width]


def _masters(optimizer: Any, plans: Plans) -> dict[Any, list[tuple[int, Tensor]]]:
    """The FP32 master weights of this rank's slice, by bucket: (place in the bucket, values)."""
    found: dict[Any, list[tuple[int, Tensor]]] = {}
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            ours = bucket.param_data is not None and bucket.param_data.dtype in _DTYPES[1:]
            experts = not all(getattr(p, "allreduce", True) for p in bucket.params)
            alone = buffer.data_parallel_world_size == 1
            if ours and not experts and not alone and plans.of(bucket).compresses:
                found[bucket] = []
    for models, masters in zip(
        optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        for model, master in zip(models, masters, strict=True):
            buffer, _, number = optimizer.model_param_gbuf_map[model]
            bucket = optimizer.buffers[buffer].buckets[number]
            if bucket in found:
                place = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                found[bucket].append((place.start, master))
    return found
