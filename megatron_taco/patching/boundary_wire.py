"""The pipeline's communicator with messages of boundaries instead of activations.

Wraps ``P2PCommunicator._communicate``, through which every schedule sends and receives. The
original runs on an overlay of itself that believes in variable shapes, so that the size of what
comes from either side is ours; its own operations, groups and waiting are untouched.

Forward messages are made by the sending half and read by the receiving half, inside the model,
where the chunk and its boundary are known. Here only sizes are needed, which are the same for all
boundaries of a model. Gradients are coded here, by quantisers that have no state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_taco.boundaries import Boundary
from megatron_taco.patching.boundary_message import ATTRIBUTE, Arrived, MessageForm, Outgoing
from megatron_taco.patching.errors import BoundaryError
from megatron_taco.patching.overlay import Overlay
from megatron_taco.telemetry.costs import Cost
from megatron_taco.telemetry.counters import Counters, Flow

FORWARD = Flow("pp.forward", "send")
BACKWARD = Flow("pp.backward", "send")

Shape = tuple[int, ...]


class _Handle:
    """Megatron's handle of a message; keeps it alive, and does what follows its arrival once."""

    def __init__(self, handle: Any, message: Tensor | None, then: Callable[[], None]) -> None:
        self._handle, self._message = handle, message
        self._then: Callable[[], None] | None = then

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._handle.wait(*args, **kwargs)
        then, self._then, self._message = self._then, None, None
        if then is not None:
            then()
        return result


def _nothing() -> None:
    """What follows a message that was sent."""


class Wire:
    """Sends and receives for the boundaries of this process.

    Args:
        form: of the messages.
        counters: count what is sent.
        ends: gives a boundary of this process that is a ``sender`` or a ``receiver``.
        cost: of the axis.

    Attributes:
        sampling: whether the error of gradients is sampled in the step that runs.
    """

    def __init__(
        self,
        form: Callable[[], MessageForm],
        counters: Counters,
        ends: Callable[[str], Boundary],
        cost: Cost,
    ) -> None:
        self._form, self._counters, self._ends = form, counters, ends
        self.sampling = False
        self._cost = cost

    def communicate(
        self, original: Callable[..., Any], hit: Callable[[], None]
    ) -> Callable[..., Any]:
        """Wrap ``P2PCommunicator._communicate``."""

        @functools.wraps(original)
        def _communicate(
            this: Any,
            *,
            tensor_send_next: Tensor | None,
            tensor_send_prev: Tensor | None,
            recv_prev: bool,
            recv_next: bool,
            tensor_shape: Any,
            wait_on_reqs: bool = True,
        ) -> tuple[Tensor | None, Tensor | None, Any]:
            hit()
            config = this.config
            dtype: torch.dtype = config.pipeline_dtype
            if config.variable_seq_lengths or getattr(config, "mtp_standalone", False):
                shapes = this._communicate_shapes(
                    tensor_send_next, tensor_send_prev, recv_prev, recv_next
                )
            else:
                shapes = (tensor_shape, tensor_shape)
            from_prev = self._empty("receiver", shapes[0], dtype) if recv_prev else None
            from_next = self._empty("sender", shapes[1], dtype) if recv_next else None
            sizes = (
                (self._size("receiver", from_prev),),
                (self._size("sender", from_next),),
            )
            overlay = Overlay(
                this,
                config=Overlay(config, variable_seq_lengths=True),
                _communicate_shapes=lambda *_: sizes,
            )
            to_next = self._forward_message(tensor_send_next, dtype)
            to_prev = self._gradient_message(tensor_send_prev, dtype)
            message_prev, message_next, requests = original(
                overlay,
                tensor_send_next=to_next,
                tensor_send_prev=to_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
            if from_prev is not None:
                setattr(from_prev, ATTRIBUTE, Arrived(message_prev.detach()))
            decode = _nothing
            if from_next is not None:
                decode = functools.partial(self._take_gradient, from_next, message_next.detach())
            if isinstance(requests, dict):
                sent = {"send_next": to_next, "send_prev": to_prev}
                requests = {
                    name: _Handle(
                        handle, sent.get(name), decode if name == "recv_next" else _nothing
                    )
                    for name, handle in requests.items()
                }
            elif requests:
                raise BoundaryError(
                    "compression.pipeline_parallel: this communicator returned before its "
                    "messages arrived and without a handle for each; use batch_p2p_comm or "
                    "overlap_p2p_comm"
                )
            else:
                decode()
            return from_prev, from_next, requests

        return _communicate

    def _empty(self, end: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """What the schedule gets at once, [s, b, width] of a message that is still under way."""
        boundary = self._ends(end)
        s, b = shape[0], shape[1]
        return torch.empty(
            boundary.wire_shape(s, b),
            dtype=dtype,
            device=torch.cuda.current_device(),
            requires_grad=True,
        )

    def _size(self, end: str, tensor: Tensor | None) -> int:
        """Elements of the message for what ``_empty`` returned."""
        if tensor is None:
            return 0
        s, b, _ = tensor.shape
        backward = end == "sender"
        size = self._ends(end).wire_bytes(s, b, tensor.dtype, backward=backward)
        return self._form().elements(size, s, b, tensor.dtype, ids=not backward)

    def _forward_message(self, z: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if z is None:
            return None
        outgoing = getattr(z, ATTRIBUTE, None)
        if not isinstance(outgoing, Outgoing) or outgoing.message.dtype != dtype:
            found = "it has no message of a boundary"
            if isinstance(outgoing, Outgoing):
                found = f"it is {outgoing.message.dtype} where the pipeline has {dtype}"
            raise BoundaryError(
                f"compression.pipeline_parallel: the output of a stage, {list(z.shape)}, cannot "
                f"be sent: {found}; a forward step has to return the model's output itself"
            )
        delattr(z, ATTRIBUTE)
        self._count(FORWARD, prod(outgoing.shape) * dtype.itemsize, outgoing.message)
        return outgoing.message

    def _gradient_message(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if gradient is None:
            return None
        boundary = self._ends("receiver")
        if self.sampling:
            self._sample_gradient(boundary, gradient)
        with self._cost.timed():
            message = self._form().join(boundary.pack_gradient(gradient), None, dtype)
        s, b, _ = gradient.shape
        self._count(BACKWARD, s * b * boundary.hidden * dtype.itemsize, message)
        return message

    @torch.no_grad()
    def _sample_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        pair = boundary.gradient_error_pair(gradient)
        if pair is not None:
            exact, decoded = pair
            self._counters[BACKWARD].add_error(exact.float(), decoded.float())

    def _take_gradient(self, gradient: Tensor, message: Tensor) -> None:
        boundary = self._ends("sender")
        s, b, _ = gradient.shape
        size = boundary.wire_bytes(s, b, gradient.dtype, backward=True)
        payload, _ = self._form().split(message, size, s, b, ids=False)
        with torch.no_grad(), self._cost.timed():
            gradient.copy_(boundary.unpack_gradient(payload, s, b, gradient.dtype))

    def _count(self, flow: Flow, raw: int, message: Tensor) -> None:
        count = self._counters[flow]
        count.seen += 1
        count.compressed += 1
        count.raw += raw
        size = message.numel() * message.element_size()
        count.wire += size
        self._cost.called(size)
        count.largest = max(count.largest, raw)
