"""The data-parallel seam: Megatron's own reductions of gradients and gathers of weights.

Megatron keeps gradients and weights in flat buckets, and a bucket group starts one collective a
bucket in ``start_grad_sync`` and ``start_param_sync``. These look up as globals of their module
``dist_reduce_scatter_func``, ``dist_all_gather_func``, ``torch.distributed.all_reduce`` and
``_coalescing_manager``. Ours stand there all the time and pass everything on, but while a bucket
group that is to be compressed runs one of the two: then the bucket goes compressed, and instead of
torch's coalescing manager, which would put our messages off until after they had been decoded,
Megatron gets a list of our handles to wait for.

    start_grad_sync, start_param_sync    which bucket group runs now         (here, data_sync)
    the collectives in them              what each bucket becomes            (data_sends)
    _copy_main_params_to_model_params    what has changed of the weights     (data_changes)
    DistributedDataParallel.__init__     kinds of the buckets' parameters    (data_plans)
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_taco.compressors import Compressor
from megatron_taco.patching.data_changes import Changes
from megatron_taco.patching.data_counts import BucketCounts, Counter
from megatron_taco.patching.data_local import LocalSteps
from megatron_taco.patching.data_methods import BucketMethods, Make
from megatron_taco.patching.data_plans import ModelParameters, Plan, Plans, Stream
from megatron_taco.patching.data_sends import BucketSends
from megatron_taco.patching.data_sync import Handles, Moment, Sync, Syncing, group_of, is_ours
from megatron_taco.patching.registry import Registry
from megatron_taco.telemetry.costs import Cost

OWNER = "compression.data_parallel"

Hit = Callable[[], None]


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
        local_steps: Steps between two exchanges, where replicas step apart, or None.
    """

    gradients: Stream | None
    weights: Stream | None
    difference: bool
    inside_node: Compressor | None
    ranks_per_node: int | None
    seed: int
    counter: Counter
    make_method: Make | None = None
    local_steps: int | None = None

    def __post_init__(self) -> None:
        """Start with nothing known of the model."""
        self.cost = Cost(OWNER, state=self._state_bytes)
        self.moment = Moment()
        self.model = ModelParameters()
        self.plans: dict[str, Plans] = {}
        if self.gradients is not None:
            self.plans["grad_data"] = Plans(self.gradients, self.model, lambda b: b.grad_data)
        if self.weights is not None:
            self.plans["param_data"] = Plans(self.weights, self.model, lambda b: b.param_data)
        self.methods: BucketMethods | None = None
        if self.gradients is not None and self.make_method is not None:
            self.methods = self._make_methods(self.gradients, self.make_method)
        self._models: list[weakref.ref[Any]] = []
        self._syncing = Syncing()
        self._counts = BucketCounts(self.counter, self.moment)
        self._changes: Changes | None = None
        if self.weights is not None:
            self._changes = Changes(self.plans["param_data"], self.difference)
        self.sends = BucketSends(
            self._syncing,
            self.moment,
            self._counts,
            self.cost,
            seed=self.seed,
            methods=self.methods,
            changes=self._changes,
            difference=self.difference,
            inside_node=self.inside_node,
            ranks_per_node=self.ranks_per_node,
        )

    def _make_methods(self, stream: Stream, make: Make) -> BucketMethods:
        if self.local_steps is None:
            return BucketMethods(stream, self.model, make)
        return LocalSteps(
            stream,
            self.model,
            make,
            rounds=self.local_steps,
            buckets=lambda: self.buckets("grad_data"),
            on_sent=lambda kind, nbytes: self._counts.outer(stream, kind, nbytes),
        )

    @property
    def local(self) -> LocalSteps | None:
        """The local steps of replicas, where they take any."""
        return self.methods if isinstance(self.methods, LocalSteps) else None

    def begin_step(self, step: int, sampling: bool) -> None:
        """Before a training step, counted from 0; ``sampling`` if errors are sampled in it."""
        self.moment.step, self.moment.sampling = step, sampling
        if self.local is not None:
            self.local.begin_step(step)

    def end_step(self, step: int) -> None:
        """After a step of replicas that step apart."""
        if self.local is not None:
            with torch.no_grad(), self.cost.timed():
                self.local.end_step(step)

    def _state_bytes(self) -> int:
        return 0 if self.methods is None else self.methods.state_bytes

    def buckets(self, flat: str) -> Iterator[tuple[Any, Plan, ProcessGroup]]:
        """Every bucket of this rank that is ours, with its plan and its group.

        Args:
            flat: ``grad_data`` for gradients, ``param_data`` for weights.
        """
        for reference in self._models:
            ddp = reference()
            for bucket_group in [] if ddp is None else ddp.bucket_groups:
                if is_ours(bucket_group, flat):
                    for bucket in bucket_group.buckets:
                        yield bucket, self.plans[flat].of(bucket), group_of(bucket_group)

    def _start_grad_sync(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        plans = self.plans["grad_data"]

        @functools.wraps(original)
        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(group, "grad_data"):
                return original(group, *args, **kwargs)
            hit()
            compressed = self.moment.step >= plans.stream.start_step and any(
                plans.of(bucket).compresses for bucket in group.buckets
            )
            with self._of(group, plans, compressed):
                return original(group, *args, **kwargs)

        return start_grad_sync

    def _start_param_sync(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        plans, changes = self.plans["param_data"], self._changes
        assert changes is not None

        @functools.wraps(original)
        def start_param_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(group, "param_data"):
                return original(group, *args, **kwargs)
            hit()
            compressed = any(bucket in changes for bucket in group.buckets)
            with self._of(group, plans, compressed):
                return original(group, *args, **kwargs)

        return start_param_sync

    def _of(
        self, group: Any, plans: Plans, compressed: bool
    ) -> contextlib.AbstractContextManager[None]:
        sync = Sync(list(group.buckets), plans, compressed, Handles(self.cost))
        return self._syncing.of(sync, self.cost)

    def _coalescing(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @contextlib.contextmanager
        def coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
            sync = self._syncing.now
            if sync is None or not sync.compressed:
                with original(*args, **kwargs) as manager:
                    yield manager
                return
            hit()
            yield sync.handles

        return coalescing_manager

    def _copy_main_params(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        weights = self._changes
        assert weights is not None

        @functools.wraps(original)
        def copy_main_params(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if optimizer.is_stub_optimizer:
                return original(optimizer, *args, **kwargs)
            hit()
            if self.moment.step < weights.plans.stream.start_step:
                return original(optimizer, *args, **kwargs)
            with self.cost.timed(), weights.kept(optimizer, self._count_exact_gather):
                result = original(optimizer, *args, **kwargs)
            self.cost.buffers = max(self.cost.buffers, weights.kept_bytes)
            return result

        return copy_main_params

    def _count_exact_gather(self, plan: Plan, group: ProcessGroup) -> None:
        self._counts.bucket(plan, "all_gather", group, False)

    def _ddp_init(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:
            hit()
            original(ddp, *args, **kwargs)
            from megatron.core import parallel_state

            size = parallel_state.get_tensor_model_parallel_world_size()
            self.model.learn(ddp.module, size)
            self._models.append(weakref.ref(ddp))
            self.sends.settle(parallel_state.get_data_parallel_group(with_context_parallel=True))

        return __init__

    def claim(self, registry: Registry) -> None:
        """Claim all targets; nothing is replaced until the registry is applied."""
        claims: dict[str, Callable[[Any, Hit], Any]] = {
            "data.ddp_init": self._ddp_init,
            "data.coalescing_manager": self._coalescing,
        }
        if self.gradients is not None:
            claims["data.start_grad_sync"] = self._start_grad_sync
            claims["data.reduce_scatter"] = self.sends.reduce_scatter
            claims["data.torch"] = self.sends.torch
        if self.weights is not None:
            claims["data.start_param_sync"] = self._start_param_sync
            claims["data.all_gather"] = self.sends.all_gather
            claims["data.copy_main_params"] = self._copy_main_params
        for name, replacement in claims.items():
            registry.claim(name, OWNER, replacement)
