"""The flows of the data-parallel axis: what is counted, and what has to happen."""

from __future__ import annotations

from megatron_taco.patching.data_plans import GRADIENTS, WEIGHTS, Stream
from megatron_taco.patching.parameter_kinds import KINDS
from megatron_taco.telemetry.counters import Flow

INSIDE_NODE = "inside_node"
"""The first hop of a reduce-scatter in two; the second is counted as the reduce-scatter."""


def all_flows(method: str | None = None) -> list[Flow]:
    """Every flow this seam can count, in report order.

    Args:
        method: The method with memory that takes gradients, if one does.
    """
    kinds = KINDS if method is None else (method, *KINDS)
    gradients = [
        Flow(f"{GRADIENTS}.{kind}", collective)
        for collective in ("reduce_scatter", INSIDE_NODE, "all_reduce")
        for kind in kinds
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
    if stream.method is not None:
        return [Flow(f"{stream.role}.{stream.method}", collective)]
    kinds = [kind for kind in ("attention", "mlp") if not stream.is_exact(kind)]
    return [Flow(f"{stream.role}.{kind}", collective) for kind in kinds]
