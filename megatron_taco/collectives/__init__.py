"""Collectives over encoded bytes: the signatures of ``torch.distributed``, and a compressor.

Every call takes its group by name and works on FP32, BF16 and FP16 tensors of any size. Which
calls are compressed at all is decided elsewhere (:mod:`megatron_taco.collectives.router`).
"""

from megatron_taco.collectives.all_gather import all_gather
from megatron_taco.collectives.all_reduce import all_reduce, choose_algorithm
from megatron_taco.collectives.launch import OnPayload
from megatron_taco.collectives.nodes import NodeGroups, Topology
from megatron_taco.collectives.reduce_scatter import reduce_scatter
from megatron_taco.collectives.traffic import Traffic, traffic
from megatron_taco.collectives.work import Work

__all__ = [
    "NodeGroups",
    "OnPayload",
    "Topology",
    "Traffic",
    "Work",
    "all_gather",
    "all_reduce",
    "choose_algorithm",
    "reduce_scatter",
    "traffic",
]
