"""The targets in the real megatron-core: every one fits, and undo leaves no trace."""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from megatron_taco.patching.fingerprints import known
from megatron_taco.patching.inspection import inspect_all, megatron_root, megatron_version
from megatron_taco.patching.registry import Hit, Registry
from megatron_taco.patching.targets import SUPPORTED, TARGETS, get

WRAPPED = {target.path for target in TARGETS}


class Proxy(ModuleType):
    """A module that stands in front of another."""

    def __init__(self, original: ModuleType) -> None:
        super().__init__(original.__name__)
        self.__dict__["original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


def stand_in(original: Any, hit: Hit) -> Any:
    """A replacement of the kind that a target calls for: a proxy, a subclass or a wrapper."""
    if isinstance(original, ModuleType):
        return Proxy(original)
    if inspect.isclass(original):
        return type(f"Counted{original.__name__}", (original,), {})

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hit()
        return original(*args, **kwargs)

    return wrapper


Entries = dict[tuple[str, str], Any]


def globals_of_megatron() -> Entries:
    """Every global of the loaded modules of Megatron: (module, name) -> object."""
    return {
        (module_name, name): value
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] == "megatron" and isinstance(module, ModuleType)
        for name, value in vars(module).items()
        if name != "__warningregistry__"
    }


def attributes_of(classes: set[type]) -> Entries:
    """Every raw class attribute: (`module.Class`, name) -> entry."""
    return {
        (f"{cls.__module__}.{cls.__qualname__}", name): raw
        for cls in classes
        for name, raw in vars(cls).items()
    }


def differing(before: Entries, after: Entries) -> set[str]:
    """The places that hold another object than before, or appeared or went."""
    missing = object()
    return {
        ".".join(key)
        for key in before.keys() | after.keys()
        if before.get(key, missing) is not after.get(key, missing)
    }


@pytest.fixture
def applied() -> Iterator[Registry]:
    registry = Registry()
    for target in TARGETS:
        registry.claim(target.name, "test", stand_in)
    with registry.apply():
        yield registry


def test_every_target_is_ok_in_the_installed_version() -> None:
    root = megatron_root()
    assert root is not None
    findings = inspect_all(TARGETS, known())
    assert [(f.target.name, f.status, f.detail) for f in findings if f.status != "ok"] == []
    assert {finding.like for finding in findings} == {megatron_version(root)}
    assert all((root / finding.file).is_file() for finding in findings)


def test_names_are_unique_and_tell_the_axis() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert len(WRAPPED) == len(TARGETS)
    for target in TARGETS:
        assert target.name.split(".")[0] == target.axis
        assert target.versions == SUPPORTED
        assert get(target.name) is target


def test_apply_replaces_the_targets_alone_and_undo_restores_every_object() -> None:
    for target in TARGETS:
        __import__(target.module)
    before = globals_of_megatron()
    classes = {
        value
        for (module, _), value in before.items()
        if inspect.isclass(value) and value.__module__ == module
    }
    attributes = attributes_of(classes)
    registry = Registry()
    for target in TARGETS:
        registry.claim(target.name, "test", stand_in)
    with registry.apply():
        changed = differing(before, globals_of_megatron())
        changed |= differing(attributes, attributes_of(classes))
        assert changed >= WRAPPED
        # On top come only the modules that imported Megatron's own functions and classes by value,
        # never those that hold torch or a collective of torch.
        importable = {target.attribute for target in TARGETS}
        importable -= {"torch", "dist_all_gather_func", "dist_reduce_scatter_func"}
        assert {place.rsplit(".", 1)[1] for place in changed - WRAPPED} <= importable
    assert differing(before, globals_of_megatron()) == set()
    assert differing(attributes, attributes_of(classes)) == set()


def test_only_the_named_modules_see_another_torch(applied: Registry) -> None:
    import torch
    from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import cross_entropy, layers, mappings

    for module in (layers, mappings, param_and_grad_buffer):
        assert isinstance(module.torch, Proxy)
    for module in (cross_entropy, distributed_data_parallel, clip_grads):
        assert module.torch is torch
    scatter = torch.distributed.reduce_scatter_tensor
    assert layers.dist_reduce_scatter_func is not scatter
    assert param_and_grad_buffer.dist_reduce_scatter_func is not scatter


def test_megatron_looks_the_replacement_up_at_call_time() -> None:
    """`initialize_megatron` imports `compile_helpers` when it runs, and gets ours."""
    from megatron.core.datasets import utils

    native = utils.compile_helpers

    def nothing(original: Callable[[], None], hit: Hit) -> Callable[[], None]:
        assert original is native
        return hit

    registry = Registry()
    registry.claim("startup.compile_helpers", "test", nothing)
    with registry.apply():
        from megatron.core.datasets.utils import compile_helpers

        compile_helpers()
        assert registry.hits == {"startup.compile_helpers": 1}
    assert utils.compile_helpers is native


def test_a_subclassed_autograd_function_runs_forward_and_backward() -> None:
    """Overridden static methods of a subclass are what autograd calls."""
    import torch
    from megatron.core.tensor_parallel import mappings

    class OfOne:
        def size(self) -> int:
            return 1

    def counted(original: type[torch.autograd.Function], hit: Hit) -> type:
        class Counted(original):  # type: ignore[misc, valid-type]
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                hit()
                return original.forward(ctx, *args)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                hit()
                return original.backward(ctx, *grads)

        return Counted

    registry = Registry()
    registry.claim("tensor.copy_function", "test", counted)
    x = torch.ones(3, requires_grad=True)
    with registry.apply():
        mappings._CopyToModelParallelRegion.apply(x, OfOne()).sum().backward()
        assert registry.hits == {"tensor.copy_function": 2}
    mappings._CopyToModelParallelRegion.apply(x, OfOne()).sum().backward()
    assert registry.hits == {"tensor.copy_function": 2}
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
