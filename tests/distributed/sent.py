"""Counts the bytes that torch.distributed is given to send to others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_OTHERS = """all_reduce all_gather all_to_all broadcast gather scatter reduce reduce_scatter
    reduce_scatter_tensor all_gather_object broadcast_object_list send recv isend irecv
    batch_isend_irecv barrier"""


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a collective that is not one of the two wire messages")


@contextmanager
def counted() -> Iterator[Counter[ProcessGroup]]:
    """Bytes by group, for a context in which only the two wire messages, of uint8, may be sent."""
    sent: Counter[ProcessGroup] = Counter()
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def counted_exchange(output: Tensor, input: Tensor, *, group: Any, **kwargs: Any) -> Any:
        assert input.dtype == output.dtype == torch.uint8
        assert input.numel() == output.numel()
        splits = kwargs.get("input_split_sizes")
        kept = input.numel() // group.size() if splits is None else splits[group.rank()]
        sent[group] += input.numel() - kept
        return exchange(output, input, group=group, **kwargs)

    def counted_gather(output: Tensor, input: Tensor, *, group: Any, **kwargs: Any) -> Any:
        assert input.dtype == output.dtype == torch.uint8
        sent[group] += (group.size() - 1) * input.numel()
        return gather(output, input, group=group, **kwargs)

    with ExitStack() as patches:
        for name in _OTHERS.split():
            patches.enter_context(mock.patch.object(dist, name, _refuse))
        patches.enter_context(mock.patch.object(dist, "all_to_all_single", counted_exchange))
        patches.enter_context(mock.patch.object(dist, "all_gather_into_tensor", counted_gather))
        yield sent
