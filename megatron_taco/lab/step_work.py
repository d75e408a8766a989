"""What a boundary itself costs, without its messages: time of its two halves, beside a stage's.

Measured once training is over, on the run's own modules and message sizes. The stages take turns,
so that those which share a GPU do not disturb each other; then all exchange the gradients of their
projectors together, as they do once a step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.boundaries import Boundary
from megatron_taco.lab.step_pipeline import PipelineArms
from megatron_taco.lab.step_schedule import PLAIN
from megatron_taco.patching.boundary_gradients import EXCHANGE, Groups, whole_gradients
from megatron_taco.telemetry.counters import Counters

_CALLS: Final = 10
_REPEATS: Final = 5
_LONG_S: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one kind of boundary costs, on the rank where its share is largest.

    Attributes:
        arm: Its name.
        micro_batch_s: Seconds of its halves on a rank for a micro-batch, forward and backward.
        step_s: Seconds of the update at the end of a step.
        compute_s: Seconds of the stage for a micro-batch, forward and backward, of the rank where
            it takes least.
        share: Of a step's boundary work in a step's compute.
        exchange_bytes: That a rank sends to swap the gradients of its projectors, once a step.
        exchange_s: Seconds of that, all ranks at once.
    """

    arm: str
    micro_batch_s: float
    step_s: float
    compute_s: float
    share: float
    exchange_bytes: int
    exchange_s: float


def measure_work(arms: PipelineArms) -> list[Work]:
    """Measures each kind of boundary; a collective call. The models are of no use afterwards.

    Where ranks share a layer (tensor or context parallelism) nothing is measured: a stage's time
    would hold their collectives.

    Args:
        arms: Of the run.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    if mpu.get_tensor_model_parallel_world_size() > 1 or mpu.get_context_parallel_world_size() > 1:
        return []
    sizes = args.seq_length, args.micro_batch_size, args.hidden_size, args.padded_vocab_size
    stage = _Stage(sizes, args.params_dtype)
    count = get_num_microbatches()
    waiting = dist.new_group(backend="gloo")  # one of NCCL's would keep a shared GPU busy
    rows = []
    for turn in range(dist.get_world_size()):
        dist.barrier(group=waiting)
        if turn == dist.get_rank():
            compute = _seconds(lambda: stage.compute(arms.chunks(PLAIN)))
            for hooks in arms.hooks.values():
                parts = [stage.boundary_work(each) for each in hooks.boundaries.values()]
                each_s, step_s = (sum(part[i] for part in parts) for i in range(2))
                share = (count * each_s + step_s) / (count * compute)
                rows.append([each_s, step_s, -compute, share])
    dist.barrier(group=waiting)
    for row, hooks in zip(rows, arms.hooks.values(), strict=True):
        row += _exchange(hooks.boundaries)
    device = torch.device(torch.cuda.current_device())
    largest = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [
        Work(
            arm=name,
            micro_batch_s=row[0],
            step_s=row[1],
            compute_s=-row[2],
            share=row[3],
            exchange_bytes=int(row[4]),
            exchange_s=row[5],
        )
        for name, row in zip(arms.hooks, largest.tolist(), strict=True)
    ]


class _Stage:
    """Makes this rank's inputs and runs what it would run for a micro-batch."""

    def __init__(self, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self._s, self._b, hidden, vocab = sizes
        self._dtype = dtype
        device = torch.device(torch.cuda.current_device())
        self._device = device
        self._ids = torch.randint(0, vocab, (self._b, self._s), device=device)
        self._positions = torch.arange(self._s, device=device).expand(self._b, -1)
        self._x = torch.randn(self._s, self._b, hidden, device=device).to(dtype)

    def _arrived(self) -> Tensor:
        return self._x.detach().requires_grad_()

    def compute(self, chunks: list[Any]) -> None:
        """Run a micro-batch forward and backward through this rank's chunks."""
        from megatron.core.utils import get_attr_wrapped_model

        for chunk in chunks:
            if not get_attr_wrapped_model(chunk, "pre_process"):
                get_attr_wrapped_model(chunk, "set_input_tensor")(self._arrived())
            output = chunk(self._ids, self._positions, None, labels=self._ids)
            output.backward(torch.ones_like(output))

    def boundary_work(self, boundary: Boundary) -> tuple[float, float]:
        """Returns the seconds of this rank's part for a micro-batch, and of the step's end."""
        parts = {"sender": self._send, "receiver": self._receive, "both": self._pass}
        each = _seconds(functools.partial(parts[boundary.place.ends], boundary))
        held = list(boundary.gradient_parts().values())
        gradient = torch.randn_like(held[0]) if held else None

        def end_step() -> None:
            boundary.end_step(gradient, 0.0, boundary.statistics())

        return each, _seconds(end_step)

    def _send(self, boundary: Boundary) -> None:
        z = boundary.encode(self._arrived(), self._ids)
        boundary.pack(z)
        payload = self._payload(boundary, backward=True)
        z.backward(boundary.unpack_gradient(payload, self._s, self._b, self._dtype))

    def _receive(self, boundary: Boundary) -> None:
        payload = self._payload(boundary, backward=False)
        z = boundary.unpack(payload, self._s, self._b, self._dtype).requires_grad_()
        boundary.decode(z, self._ids).backward(self._x)
        assert z.grad is not None
        boundary.pack_gradient(z.grad)

    def _pass(self, boundary: Boundary) -> None:
        boundary(self._arrived(), self._ids).backward(self._x)

    def _payload(self, boundary: Boundary, *, backward: bool) -> Tensor:
        """A message of zeros, which every code can read."""
        size = boundary.wire_bytes(self._s, self._b, self._dtype, backward)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)


def _exchange(boundaries: dict[int, Boundary]) -> list[float]:
    """Bytes and seconds of swapping the projectors' gradients with the neighbours."""
    from megatron.core import parallel_state as mpu

    groups = Groups((), 1.0, mpu.get_pipeline_model_parallel_group())
    counters = Counters([EXCHANGE])
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        whole_gradients(boundaries, groups, None, counters)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return [counters[EXCHANGE].wire / _REPEATS, statistics.median(times)]


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of a call, of short ones among others like it; what comes first warms up."""
    start = time.perf_counter()
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
    torch.cuda.synchronize()
    calls = _CALLS if time.perf_counter() - start < _LONG_S else 1
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
