"""What has changed of the weights since all data-parallel ranks last agreed on them.

SDP4Bit (arXiv 2410.15526): after the optimiser has written its FP32 master weights W into this
rank's slice of a bucket, rounded, that slice is put back to what all ranks hold, V, and W - V is
kept; the gather then sends Q(W - V), and every rank, the owner too, makes V <- round(V + Q(W - V)).
So V is Megatron's own parameter buffer, nothing has to be saved besides it, and errors do not pile
up: what one step rounds away is in the next difference. V is made equal on all ranks by one exact
gather before the first such step of a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.patching.data_plans import Plan, Plans

_ROUNDED = (torch.bfloat16, torch.float16)

OnGather = Callable[[Plan, ProcessGroup], None]


class Changes:
    """The changes of every bucket from the optimiser's step to the gather that follows.

    Attributes:
        plans: The buckets' plans for weights.
    """

    def __init__(self, plans: Plans, difference: bool) -> None:
        """Start with none.

        Args:
            plans: The buckets' plans for weights.
            difference: Keep W - V; otherwise W.
        """
        self.plans = plans
        self._difference = difference
        self._kept: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self._made_equal: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the changes that are waiting for their gather."""
        return sum(t.numel() * t.element_size() for t in self._kept.values())

    def __contains__(self, bucket: Any) -> bool:
        return bucket in self._kept

    def take(self, bucket: Any) -> Tensor | None:
        """Return a bucket's changes, FP32 as long as this rank's slice, and forget them."""
        return self._kept.pop(bucket, None)

    @contextlib.contextmanager
    def kept(self, optimizer: Any, on_gather: OnGather) -> Iterator[None]:
        """Keep the changes that a distributed optimiser writes meanwhile.

        Args:
            optimizer: Megatron's, whose master weights are new.
            on_gather: Told about each exact gather.
        """
        masters = self._masters(optimizer)
        group = optimizer.data_parallel_group
        before = {bucket: self._agreed(bucket, group, on_gather) for bucket in masters}
        yield
        for bucket, pieces in masters.items():
            self._keep(bucket, pieces, before[bucket], group)

    def _agreed(self, bucket: Any, group: ProcessGroup, on_gather: OnGather) -> Tensor:
        """This rank's slice as all ranks hold it, which the first time is made sure of."""
        own = _own_slice(bucket.param_data, group)
        if bucket not in self._made_equal:
            dist.all_gather_into_tensor(bucket.param_data, own.clone(), group=group)
            on_gather(self.plans.of(bucket), group)
            self._made_equal[bucket] = True
        return own.clone()

    def _keep(
        self,
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
        if self._difference:
            changes -= before.float()
        mine = self.plans.of(bucket).slices(group.size(), equal=True)[group.rank()]
        for part in mine.parts:
            if not part.exact:
                for first, last in part.spans:
                    own[first - start : last - start] = before[first - start : last - start]
        self._kept[bucket] = changes

    def _masters(self, optimizer: Any) -> dict[Any, list[tuple[int, Tensor]]]:
        """FP32 master weights of this rank's slice, by bucket: (place in the bucket, values)."""
        found: dict[Any, list[tuple[int, Tensor]]] = {}
        for buffer in optimizer.buffers:
            for bucket in buffer.buckets:
                rounded = bucket.param_data is not None and bucket.param_data.dtype in _ROUNDED
                experts = not all(getattr(p, "allreduce", True) for p in bucket.params)
                alone = buffer.data_parallel_world_size == 1
                if rounded and not experts and not alone and self.plans.of(bucket).compresses:
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


def _own_slice(flat: Tensor, group: ProcessGroup) -> Tensor:
    width = flat.numel() // group.size()
    return flat[group.rank() * width : (group.rank() + 1) * width]
