"""How each data-parallel bucket travels: its kinds, its slices, and what is compressed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_taco.collectives.buckets import Codec
from megatron_taco.collectives.segments import Run, Slice, runs_of, slice_of
from megatron_taco.collectives.traffic import Traffic
from megatron_taco.collectives.two_level import Nodes
from megatron_taco.compressors import BlockInteger, Compressor
from megatron_taco.compressors.counter_random import key_of
from megatron_taco.patching.parameter_kinds import NORM, REPLICATED, TIED, kind_of

GRADIENTS, WEIGHTS = "dp.gradients", "dp.weights"
"""Roles; each flow has the kind of parameters after a dot."""
_SLICE_UNIT = 512
"""Slices of a two-shot all-reduce are multiples of this, so that few blocks are partly padding."""
_SUM_BYTES = 4
"""Bytes of an exact value between nodes: sums of a node travel in FP32."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What is compressed of the gradients, or of the weights.

    Attributes:
        role: ``dp.gradients`` or ``dp.weights``.
        compressor: Encodes what is not exact; None where a method with memory takes the bucket.
        method: The name of that method, under which all that is not exact is counted, or None.
        local: Whether replicas take steps of their own: then no bucket is reduced, however small,
            and what two ranks of a replica hold copies of has to be exchanged exactly.
        exclude: Kinds that stay exact, besides norms.
        min_bytes: Buckets below this size in bytes go plain.
        start_step: First step, counted from 0, that is compressed.
    """

    role: str
    compressor: Compressor | None
    exclude: frozenset[str]
    min_bytes: int
    start_step: int
    method: str | None = None
    local: bool = False

    @property
    def code(self) -> Compressor:
        """The compressor, of a stream that has one."""
        assert self.compressor is not None, f"{self.role} goes by a method, not by a compressor"
        return self.compressor

    def counted(self, sent: dict[str, Traffic]) -> dict[str, Traffic]:
        """Return what was sent of each kind as it is counted: a method's kinds as one."""
        if self.method is None:
            return sent
        found: dict[str, Traffic] = {}
        for kind, traffic in sent.items():
            name = kind if self.is_exact(kind) else self.method
            before = found.get(name, Traffic(0, 0))
            found[name] = Traffic(before.raw + traffic.raw, before.wire + traffic.wire)
        return found

    def is_exact(self, kind: str) -> bool:
        """Tell whether a kind goes as it is."""
        if kind == TIED:
            return self.role == WEIGHTS or self.local or "embedding" in self.exclude
        return kind in (NORM, REPLICATED) or kind in self.exclude

    def codec(
        self, step: int, bucket: str, rank: int, seed: int, compressor: Compressor | None = None
    ) -> Codec:
        """Return the compressor of each message of one bucket in one step.

        Args:
            step: The training step.
            bucket: What identifies the bucket.
            rank: This rank among all, whose messages are to be encoded.
            seed: Of the run.
            compressor: By default the stream's.
        """
        code = compressor or self.code
        if not isinstance(code, BlockInteger) or code.rounding == "nearest":
            return lambda direction, index, kind: code

        def keyed(direction: str, index: int, kind: str) -> Compressor:
            return code.keyed(key_of(seed, step, self.role, bucket, direction, index, kind, rank))

        return keyed


@dataclass(frozen=True)
class Hops:
    """A reduce-scatter in two hops: layouts, and by kind what this rank sends in each hop."""

    nodes: Nodes
    fine: tuple[Slice, ...]
    coarse: tuple[Slice, ...]
    inside: dict[str, Traffic]
    between: dict[str, Traffic]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the messages of the first hop, the larger one: sent and received."""
        return 2 * sum(piece.size for piece in self.fine)


@dataclass(eq=False)
class Plan:
    """The layout of one bucket for one stream; made once.

    Attributes:
        name: Identifies the bucket on all ranks: its first parameter, and how many elements.
        runs: The bucket's runs of one kind.
        elements: Elements of each kind, padding included.
        by_policy: Whether the policy ``auto`` has decided that it goes plain.
    """

    name: str
    runs: tuple[Run, ...]
    numel: int
    stream: Stream
    itemsize: int
    elements: dict[str, int] = field(default_factory=dict)
    by_policy: bool = False
    _slices: dict[tuple[int, bool, Compressor, int], tuple[Slice, ...]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Count the elements of each kind."""
        for run in self.runs:
            self.elements[run.kind] = self.elements.get(run.kind, 0) + run.stop - run.start

    @property
    def compresses(self) -> bool:
        """Whether any of it is compressed: large enough, of a kind not exact, and not by policy."""
        if self.stream.local:
            return True
        large = self.numel * self.itemsize >= self.stream.min_bytes
        return large and not self.by_policy and not all(map(self.stream.is_exact, self.elements))

    def slices(
        self,
        count: int,
        *,
        equal: bool,
        compressor: Compressor | None = None,
        itemsize: int | None = None,
    ) -> tuple[Slice, ...]:
        """Return the bucket in ``count`` slices.

        Args:
            count: How many.
            equal: Of equal lengths, as a reduce-scatter has them; otherwise whole units.
            compressor: Whose payloads are laid out; by default the stream's.
            itemsize: Bytes of an exact value; by default as in the bucket.
        """
        code = compressor or self.stream.code
        size = itemsize or self.itemsize
        key = (count, equal, code, size)
        if key not in self._slices:
            width = -(-self.numel // count)
            if not equal:
                width = -(-width // _SLICE_UNIT) * _SLICE_UNIT
            bounds = [min(index * width, self.numel) for index in range(count + 1)]
            self._slices[key] = tuple(
                slice_of(
                    self.runs,
                    start,
                    stop,
                    exact=self.stream.is_exact,
                    itemsize=size,
                    payload_bytes=code.payload_bytes,
                )
                for start, stop in pairwise(bounds)
            )
        return self._slices[key]

    def hops(self, nodes: Nodes, fine: Compressor) -> Hops:
        """Return the layouts of a reduce-scatter in two hops, and what this rank sends in each.

        Args:
            nodes: The ranks by node.
            fine: Compressor of the hop inside a node; the stream's is that between nodes.
        """
        size = sum(map(len, nodes.ranks))
        inside = self.slices(size, equal=True, compressor=fine)
        between = self.slices(size, equal=True, itemsize=_SUM_BYTES)
        count, places = len(nodes.ranks), len(nodes.ranks[0])
        column = set(nodes.column)
        own = nodes.column[nodes.groups.across.rank()]

        def sent(pieces: tuple[Slice, ...], to: Iterable[int], share: float) -> dict[str, Traffic]:
            wire: dict[str, int] = dict.fromkeys(self.elements, 0)
            for index in to:
                for part in pieces[index].parts:
                    wire[part.kind] += part.size
            return {
                kind: Traffic(round(share * numel * self.itemsize), wire[kind])
                for kind, numel in self.elements.items()
            }

        return Hops(
            nodes=nodes,
            fine=inside,
            coarse=between,
            inside=sent(inside, set(range(size)) - column, (places - 1) / places),
            between=sent(between, column - {own}, (count - 1) / size),
        )

    def traffic(
        self, collective: str, rank: int, size: int, compressed: bool
    ) -> dict[str, Traffic]:
        """Return what this rank sends of each kind.

        Args:
            collective: ``reduce_scatter``, ``all_gather`` or ``all_reduce``.
            rank: This rank in the group.
            size: Ranks of the group.
            compressed: Whether the bucket goes compressed.
        """
        rings = 2 if collective == "all_reduce" else 1
        raw = {
            kind: -(-rings * (size - 1) * numel * self.itemsize // size)
            for kind, numel in self.elements.items()
        }
        wire = dict(raw) if not compressed else self._wire(collective, rank, size)
        return {kind: Traffic(raw[kind], wire.get(kind, 0)) for kind in raw}

    def buffer_bytes(self, collective: str, rank: int, size: int) -> int:
        """Return the bytes of the messages that a rank holds in one compressed call.

        Args:
            collective: As for :meth:`traffic`.
            rank: Likewise.
            size: Likewise.
        """
        if collective == "all_reduce" and one_shot(size):
            return size * self.slices(1, equal=False)[0].size
        pieces = self.slices(size, equal=collective != "all_reduce")
        gathered = size * max(piece.size for piece in pieces)
        scattered = sum(piece.size for piece in pieces) + size * pieces[rank].size
        return (gathered if collective != "reduce_scatter" else 0) + (
            scattered if collective != "all_gather" else 0
        )

    def _wire(self, collective: str, rank: int, size: int) -> dict[str, int]:
        wire: dict[str, int] = {}

        def add(piece: Slice, times: int) -> None:
            for part in piece.parts:
                wire[part.kind] = wire.get(part.kind, 0) + times * part.size

        if collective == "all_reduce" and one_shot(size):
            add(self.slices(1, equal=False)[0], size - 1)
            return wire
        pieces = self.slices(size, equal=collective != "all_reduce")
        if collective != "all_gather":
            for index, piece in enumerate(pieces):
                add(piece, int(index != rank))
        if collective != "reduce_scatter":
            add(pieces[rank], size - 1)
            # Messages of an all-gather are as long as the longest; what fills up this one counts
            # for its kinds by their bytes.
            mine = pieces[rank]
            rest = (max(piece.size for piece in pieces) - mine.size) * (size - 1)
            done = given = 0
            for part in mine.parts:
                done += part.size
                upto = rest * done // mine.size
                wire[part.kind] += upto - given
                given = upto
            if not mine.parts:
                wire[next(iter(self.elements))] = rest
        return wire


def one_shot(size: int) -> bool:
    """Tell whether an all-reduce sends whole buckets: as many bytes at P = 2, one lossy step."""
    return size <= 2


class ModelParameters:
    """Names and kinds of the parameters of all models that have been wrapped."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[int, tuple[str, str]]] = WeakKeyDictionary()

    def learn(self, module: torch.nn.Module, tensor_parallel_size: int) -> None:
        """Note the parameters of one more model chunk."""
        chunk = len(self._known)
        self._known[module] = {
            id(parameter): (f"{chunk}:{name}", kind_of(name, parameter, tensor_parallel_size))
            for name, parameter in module.named_parameters()
        }

    def _find(self, parameter: Tensor) -> tuple[str, str]:
        for known in self._known.values():
            if (found := known.get(id(parameter))) is not None:
                return found
        raise LookupError(
            f"compression.data_parallel: a parameter of shape {tuple(parameter.shape)} is in a "
            "bucket but in no model that was wrapped after compression was installed"
        )

    def name(self, parameter: Tensor) -> str:
        """Return the number of the model chunk and the name in it."""
        return self._find(parameter)[0]

    def kind(self, parameter: Tensor) -> str:
        """Return the kind of a parameter.

        Raises:
            LookupError: Its model was not seen.
        """
        return self._find(parameter)[1]


class Plans:
    """The plans of all buckets of a run, by bucket.

    Args:
        stream: What is compressed.
        model: Knows the parameters' kinds.
        flat: Gives the flat tensor of a bucket that the stream is about.
    """

    def __init__(
        self,
        stream: Stream,
        model: ModelParameters,
        flat: Callable[[Any], Tensor | None],
    ) -> None:
        self.stream = stream
        self._model = model
        self._flat = flat
        self._plans: WeakKeyDictionary[Any, Plan] = WeakKeyDictionary()

    def of(self, bucket: Any) -> Plan:
        """Return the plan of one of Megatron's buckets.

        Raises:
            LookupError: A parameter of the bucket has no known kind.
        """
        if bucket not in self._plans:
            self._plans[bucket] = self._make(bucket)
        return self._plans[bucket]

    def _make(self, bucket: Any) -> Plan:
        places = [
            (start, stop, self._model.kind(parameter))
            for parameter, (start, stop) in bucket.param_to_index.items()
        ]
        flat = self._flat(bucket)
        assert flat is not None
        return Plan(
            name=f"{self._model.name(next(iter(bucket.param_to_index)))}:{bucket.bucket_id}",
            runs=runs_of(places, flat.numel()),
            numel=flat.numel(),
            stream=self.stream,
            itemsize=flat.element_size(),
        )
