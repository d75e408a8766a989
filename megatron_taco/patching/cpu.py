"""Megatron on a machine without a GPU: the CPU shim.

Megatron asks ``torch.cuda`` for the current device, for streams, for random states and for memory
figures all over its code, and writes ``device="cuda"`` in places.  With this shim installed those
requests are answered for the CPU, so that Megatron's own loop trains on gloo unchanged.  It is
installed only for ``run.device: cpu``, it names what it replaces, and :meth:`CpuShim.undo` puts the
very same objects back.

Which places of megatron-core 0.18/0.19 need which answer:

====================================  ===========================================================
``torch.cuda.current_device()``       used as a ``device=`` argument by mappings, layers, p2p, DDP
``device="cuda"``                     schedules, optimizer, clip_grads, timers, training
``Tensor.cuda``, ``Module.cuda``      batches, language module
``Tensor.type()``                     compared with ``"torch.cuda.FloatTensor"`` by the optimizers
the loaders' seeds                    drawn from the CPU generator by some ranks only: undrawn
streams, events, synchronize          DDP, p2p, checkpoint writer: CPU work is already in order
random states                         the CUDA RNG tracker: the CPU generator plays its part
``ReduceOp.AVG``                      gloo has none: scaled, then summed
====================================  ===========================================================
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_ABSENT = object()


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Answers ``device="cuda"`` and ``pin_memory=True`` of any torch call with the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _InOrder:
    """A stream or an event on a device whose work is always complete and in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = _CPU

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., _InOrder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Milliseconds between two events; nothing is measured on this device."""
        return 0.0


class _CpuGenerators:
    """``torch.cuda.default_generators``: the CPU generator for every index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


def _answer(value: Any = None) -> Callable[..., Any]:
    """A function that always returns ``value``; a new one each time, since torch._dynamo files
    functions by identity and refuses one object under two names.
    """
    return lambda *args, **kwargs: value


def _device_properties(*args: object, **kwargs: object) -> SimpleNamespace:
    return SimpleNamespace(name="cpu", major=8, minor=0, total_memory=1 << 34)


def _cuda_answers() -> dict[str, Any]:
    """What each attribute of ``torch.cuda`` answers while the shim is installed."""
    in_order = _InOrder()
    generator = torch.default_generator
    answers: dict[str, Any] = {
        "current_device": _answer(_CPU),
        "current_stream": _answer(in_order),
        "default_stream": _answer(in_order),
        "Stream": _InOrder,
        "Event": _InOrder,
        "stream": lambda *a: contextlib.nullcontext(),
        "device": lambda *a: contextlib.nullcontext(),
        "device_count": _answer(1),  # Megatron skips its parallel groups and seeding when 0
        "memory_stats": _answer({}),
        "is_current_stream_capturing": _answer(False),
        "get_device_properties": _device_properties,
        "get_device_capability": _answer((8, 0)),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "default_generators": _CpuGenerators(),
        "_lazy_init": _answer(),
        "_lazy_call": lambda call, **kwargs: call(),
    }
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "set_stream",
        "reset_peak_memory_stats",
    ):
        answers[name] = _answer()
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        answers[name] = _answer(0)
    return answers


def _typename(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.") else name

    return type_


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return original(tensor, op=op, group=group, async_op=async_op)

    return all_reduce


def _reduce_scatter_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            input = input / dist.get_world_size(group)
            op = dist.ReduceOp.SUM
        return original(output, input, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return barrier


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output,
            input,
            as_list(output_split_sizes),
            as_list(input_split_sizes),
            group=group,
            async_op=async_op,
        )

    return all_to_all_single


def _without_draw(original: Callable[..., Any]) -> Callable[..., Any]:
    """A loader draws a seed from the CPU generator, on the ranks that read data alone; here that
    generator also plays the device's, which must stay alike on all tensor-parallel ranks.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.default_generator.get_state()
        original(self, *args, **kwargs)
        torch.default_generator.set_state(state)

    return __init__


class CpuShim:
    """Installs and undoes the answers above; see the module's docstring.

    Use as a context manager, or call :meth:`install` and :meth:`undo`.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []
        self._mode: _CudaMeansCpu | None = None

    @property
    def replaced(self) -> list[str]:
        """Dotted names of everything now replaced, in order of replacement."""
        return [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in self._saved]

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def install(self) -> CpuShim:
        """Replace; raises :class:`RuntimeError` if this shim is installed already."""
        if self._saved:
            raise RuntimeError("the CPU shim is installed already")
        for name, answer in _cuda_answers().items():
            self._set(torch.cuda, name, answer)
        for name in ("get_rng_state", "set_rng_state"):
            self._set(torch.cuda.random, name, getattr(torch.cuda, name))
        self._set(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
        self._set(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)
        self._set(torch.Tensor, "record_stream", _answer())
        self._set(torch.Tensor, "type", _typename(torch.Tensor.type))
        loader = torch.utils.data.dataloader._BaseDataLoaderIter
        self._set(loader, "__init__", _without_draw(loader.__init__))
        self._set(dist, "all_reduce", _all_reduce(dist.all_reduce))
        self._set(dist, "reduce_scatter_tensor", _reduce_scatter_tensor(dist.reduce_scatter_tensor))
        self._set(dist, "barrier", _barrier(dist.barrier))
        self._set(dist, "all_to_all_single", _all_to_all_single(dist.all_to_all_single))
        self._rebind_importers()
        self._mode = _CudaMeansCpu()
        self._mode.__enter__()
        return self

    def _rebind_importers(self) -> None:
        """Replace what modules of Megatron that are loaded already imported by value.

        Megatron's random-state tracker does so with ``torch.cuda._lazy_call``, which without a GPU
        would put every change of a random state off for ever.
        """
        answers = {
            id(original): getattr(owner, name)
            for owner, name, original in self._saved
            if callable(original)
        }
        modules = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "megatron"]
        for module in modules:
            for name, value in list(vars(module).items()):
                if id(value) in answers:
                    self._set(module, name, answers[id(value)])

    def install_megatron(self) -> CpuShim:
        """The one repair inside Megatron: its start-up asserts a GPU unless told otherwise."""
        import megatron.training.training as loop

        initialize = functools.partial(loop.initialize_megatron, allow_no_cuda=True)
        self._set(loop, "initialize_megatron", initialize)
        return self

    def undo(self) -> None:
        """Put back the very objects that were there."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def __enter__(self) -> CpuShim:
        return self.install()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
