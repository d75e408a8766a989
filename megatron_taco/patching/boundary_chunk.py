"""The boundaries of one model chunk: where they sit in its forward pass and in checkpoints.

    receiving half    before the first layer, on what Megatron set as the block's input
    in place          after a layer within the chunk, also where layers are recomputed
    sending half      after the last layer; what it returns is what Megatron sends

All by forward hooks of the very modules, so a chunk without boundaries runs Megatron's code alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_taco.boundaries import Boundary, BoundarySettings, Chain
from megatron_taco.boundaries.anchors import StaticAnchor
from megatron_taco.boundaries.subspace import Subspace
from megatron_taco.patching.boundary_layout import Span
from megatron_taco.patching.boundary_message import ATTRIBUTE, Arrived, MessageForm, Outgoing
from megatron_taco.patching.boundary_settings import SavedSettings
from megatron_taco.patching.errors import BoundaryError
from megatron_taco.patching.token_ids import TokenIds
from megatron_taco.telemetry.costs import Cost

NAME = "pipeline_boundaries"
"""The chunk's name for its boundaries, and the beginning of their keys in checkpoints."""


ANCHOR_MARK = "is_pipeline_anchor"
"""Attribute of the anchors' tables, by which the optimiser's settings find them."""


class ChunkBoundaries(nn.Module):
    """A submodule of ``GPTModel`` that holds a chunk's boundaries and hooks them in.

    Args:
        settings: of all boundaries.
        span: the chunk's part of the model.
        form: of the messages between stages.
        ids: the token ids of the running micro-batch.
        tensor_group: the tensor-parallel group.
        sequence_parallel: whether a rank holds its own part of the sequence.
        sample: told of what enters a boundary [s, b, d] in training, with its token ids.
        cost: of the axis.
        first_of_stage: whether it is the stage's first chunk, which keeps the settings.

    Attributes:
        passed: numbers of the boundaries in place, and of those sent from here, that a training
            pass has gone through.
    """

    def __init__(
        self,
        settings: BoundarySettings,
        span: Span,
        form: MessageForm,
        ids: TokenIds,
        tensor_group: torch.distributed.ProcessGroup,
        sequence_parallel: bool,
        sample: Callable[[Boundary, Tensor, Tensor | None], None],
        cost: Cost,
        first_of_stage: bool = True,
    ) -> None:
        super().__init__()
        try:
            self.chain = Chain(settings, len(span.depths), span.first, span.last)
        except ValueError as error:
            raise BoundaryError(f"compression.pipeline_parallel: {error}") from None
        if first_of_stage:
            self.settings = SavedSettings(settings, span.depths)
        self.span = span
        self._form, self._ids = form, ids
        self._group, self._sequence_parallel = tensor_group, sequence_parallel
        self._sample = sample
        self._hooks: list[Any] = []
        self._cost = cost
        self.passed: set[int] = set()
        for parameter in self.chain.parameters():
            # Megatron's mark: summed over TP under SP.
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        for anchor in self.chain.trainable_anchors:
            for parameter in anchor.parameters():
                # Megatron's mark: Muon leaves it to Adam.
                parameter.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
                setattr(parameter, ANCHOR_MARK, True)

    @property
    def boundaries(self) -> dict[int, Boundary]:
        """The boundaries by their numbers, ascending."""
        found = {}
        for number in range(1, len(self.span.depths) + 1):
            boundary = self.chain.boundary(number)
            if boundary is not None:
                found[number] = boundary
        return found

    def attach(self, model: Any) -> None:
        """Become part of a ``GPTModel`` that has just been built.

        Raises:
            BoundaryError: a boundary's layer is not in the model's block.
        """
        model.add_module(NAME, self)
        block = model.decoder
        hooks = self._hooks
        if model.pre_process:
            hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            if self.fixed_table is not None:
                hooks.append(model.embedding.register_forward_hook(self._add_fixed))
        hooks.append(block.register_forward_pre_hook(self._enter))
        hooks.append(block.register_forward_hook(self._leave, always_call=True))
        layers = {layer.layer_number: layer for layer in block.layers}
        for depth, number in self.span.inside.items():
            if depth not in layers:
                raise BoundaryError(
                    f"boundary {number}: layer {depth} is not in its chunk, whose layers are "
                    f"{sorted(layers)}"
                )
            hook = partial(self._cross, self.boundaries[number])
            hooks.append(layers[depth].register_forward_hook(hook))

    def detach(self, model: Any) -> None:
        """Leave the model: it then runs Megatron's code alone, without boundaries."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        delattr(model, NAME)

    @property
    def fixed_table(self) -> Tensor | None:
        """What a subspace network adds to its embedding, [V, d]; None for other boundaries."""
        if not isinstance(next(iter(self.boundaries.values())), Subspace):
            return None
        fixed = self.chain.anchor(self.span.first)
        assert isinstance(fixed, StaticAnchor)
        return fixed.table

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the token ids [b, s] of a chunk that begins with the embedding."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and self._sequence_parallel:
            parts = torch.distributed.get_world_size(self._group)
            ids = ids.chunk(parts, dim=1)[torch.distributed.get_rank(self._group)]
        self._ids.current = ids

    def _add_fixed(self, embedding: Any, args: Any, output: Tensor) -> Tensor:
        """Add a subspace network's fixed table to the embedding's output [s, b, d]."""
        fixed, ids = self.chain.anchor(0), self._ids.current
        assert fixed is not None
        assert ids is not None
        anchored: Tensor = output + fixed(ids, output.dtype)
        return anchored

    def _enter(self, block: Any, args: tuple[Any, ...]) -> None:
        """Decode what arrived into the block's input."""
        number = self.span.at_start
        if number is None:
            return
        boundary, z = self.chain.boundary(number), block.input_tensor
        assert boundary is not None
        arrived = getattr(z, ATTRIBUTE, None)
        if not isinstance(arrived, Arrived):
            raise BoundaryError(
                f"boundary {number}: the stage's input did not come through Megatron's pipeline "
                "communicator, so it cannot be decoded; use its forward-backward functions"
            )
        s, b, _ = z.shape
        size = boundary.wire_bytes(s, b, z.dtype)
        payload, ids = self._form.split(arrived.message, size, s, b, ids=True)
        with self._cost.timed():
            # Not without gradients: what learns from a pass looks whether it records them.
            values = boundary.unpack(payload, s, b, z.dtype)
            with torch.no_grad():
                z.copy_(values)
            delattr(z, ATTRIBUTE)
            self._ids.current = ids
            block.set_input_tensor(boundary.decode(z, ids))

    def _cross(self, boundary: Boundary, layer: Any, args: Any, output: Any) -> Any:
        """Pass a boundary in place after a layer, whose output is (hidden states, context)."""
        hidden, *rest = output
        self._watch(boundary, hidden, self._ids.current)
        with self._cost.timed():
            return (boundary(hidden, self._ids.current), *rest)

    def _leave(self, block: Any, args: Any, output: Any) -> Any:
        """Encode the block's output [s, b, d] where the chunk is cut: z with its message."""
        ids, self._ids.current = self._ids.current, None
        number = self.span.at_end
        if number is None or not isinstance(output, Tensor):
            return output
        boundary = self.chain.boundary(number)
        assert boundary is not None
        self._watch(boundary, output, ids)
        with self._cost.timed():
            z = boundary.encode(output, ids)
            message = self._form.join(boundary.pack(z), ids, z.dtype)
        s, b, d = output.shape
        setattr(z, ATTRIBUTE, Outgoing(message, (s, b, d)))
        return z

    def _watch(self, boundary: Boundary, x: Tensor, ids: Tensor | None) -> None:
        """Note a training pass, for a sample: once a micro-batch, recomputed or not."""
        if self.training and torch.is_grad_enabled():
            self.passed.add(boundary.place.index)
            self._sample(boundary, x, ids)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded state: keys by depth, one copy saved of what two stages hold.

        Args:
            prefix: of the keys.
            sharded_offsets: of Megatron; empty for a model chunk.
            metadata: of Megatron.
        """
        from megatron.core.transformer.utils import (
            ensure_metadata_has_dp_cp_group,
            make_sharded_tensors_for_checkpoint,
        )

        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = self.state_dict(prefix="", keep_vars=True)
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in state:
            entry = made[f"{prefix}{name}"]
            entry.key = prefix + self._key(name)
            if self._is_copy(name, state[name]):
                entry.replica_id = (1, *entry.replica_id[1:])
            if name.endswith(".table") and isinstance(state[name], nn.Parameter):
                # Rows of a vocabulary padded for another tensor-parallel size.
                entry.allow_shape_mismatch = True
        return made

    def _key(self, name: str) -> str:
        """The name by depth of one entry, the same however the model is cut."""
        _, *path = name.split(".")
        if len(path) < 2 or not path[1].isdigit():
            return name
        number = int(path[1])
        if path[0] == "boundaries":
            depth = self.span.depths[number - 1]
        else:
            depth = self.span.depths[number - 1] if number else 0
        return ".".join([path[0], f"after_layer_{depth}", *path[2:]])

    def _is_copy(self, name: str, value: Any) -> bool:
        """Whether another stage saves the same: the settings, and what both ends of a cut hold."""
        if name.startswith("settings."):
            return self.span.at_start is not None
        start = self.span.at_start
        of_start = start is not None and name.startswith(f"chain.boundaries.{start}.")
        return of_start and not isinstance(value, nn.Parameter)
