"""Transformer Engine's own Python on a machine without a GPU, for tests of the hooks in it.

Its compiled parts need CUDA. What tests need of those (products, a norm, enumerations) is torch's
here; its linears, their autograd functions and collectives are its own files, as released. They are
taken from an installed package, or from the wheel ``transformer-engine``, which is Python alone and
which `make` unpacks beside the environment (installed, Megatron would try to use it).
"""

import ast
import contextlib
import enum
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import torch

from megatron_taco.patching.cpu import CpuShim
from megatron_taco.patching.overlay import Overlay

_ABSENT = ("onnx", "onnxscript", "onnxscript.onnx_opset", "nvdlfw_inspect", "nvdlfw_inspect.api")
_ENUMERATIONS = {"DType": ("DType", ""), "FusedAttnBackend": ("NVTE_Fused_Attn_Backend", "NVTE_")}


def source() -> Path | None:
    """The folder that holds the package, or None where there is none."""
    places = [Path(os.environ.get("TE_SOURCE", "")), Path(sys.prefix) / "te-source"]
    spec = importlib.util.find_spec("transformer_engine")
    if spec is not None and spec.origin:
        places.insert(0, Path(spec.origin).parent.parent)
    return next((p for p in places if (p / "transformer_engine" / "pytorch").is_dir()), None)


class _Anything(ModuleType):
    """A module that has whatever is asked of it."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _stand_in(name: str) -> ModuleType:
    module = _Anything(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def load(root: Path) -> ModuleType:
    """Make ``transformer_engine.pytorch.module.linear`` and its like importable; returns the first.

    Args:
        root: the folder that holds the package.
    """
    CpuShim().install()  # for good: the process is a test's rank
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch for "no libraries there yet"
    sys.path.insert(0, str(root))
    for name in _ABSENT:
        try:
            importlib.import_module(name)
        except ImportError:
            _stand_in(name)
    debugger = sys.modules["nvdlfw_inspect.api"]
    if isinstance(debugger, _Anything):
        debugger.DEBUG_MANAGER = None
    compiled = _stand_in("transformer_engine_torch")
    package = root / "transformer_engine" / "pytorch"
    for file in ("constants.py", "cpp_extensions/fused_attn.py"):
        for node in ast.parse((package / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in _ENUMERATIONS:
                name, prefix = _ENUMERATIONS[node.name]
                names = [
                    prefix + ast.unparse(item.targets[0])
                    for item in node.body
                    if isinstance(item, ast.Assign)
                ]
                setattr(compiled, name, enum.IntEnum(name, names, start=0))
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        folder = root / Path(*name.split("."))
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.origin = str(folder / "__init__.py")
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    linear = importlib.import_module("transformer_engine.pytorch.module.linear")
    norm_linear = importlib.import_module("transformer_engine.pytorch.module.layernorm_linear")
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    for module in (linear, norm_linear):
        module.general_gemm = gemm
    norm_linear.apply_normalization = rms_norm
    compiled.rmsnorm_bwd = rms_norm_backward
    base.torch = Overlay(torch, cuda=Overlay(torch.cuda, is_available=lambda: True))
    module = base.TransformerEngineBaseModule
    # Older releases have it as a context.
    later = hasattr(module, "end_forward")
    module.prepare_forward = prepare_forward if later else prepared_forward
    module.end_forward = lambda module: None
    return linear


def prepare_forward(module: Any, inp: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As in Transformer Engine, without the check for CUDA and without FP8."""
    module.allow_different_data_and_param_types = False
    module.set_activation_dtype(inp)
    module.init_fp8_metadata(num_gemms=1)
    return inp.contiguous()


@contextlib.contextmanager
def prepared_forward(module: Any, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """The same as releases up to 2.14 have it."""
    yield prepare_forward(module, inp)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    layout: str = "TN",
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    grad: bool = False,
    **unused: Any,
) -> tuple[Any, ...]:
    """What ``general_gemm`` gives: b·aᵀ (TN), b·a (NN) or bᵀ·a (NT), and a bias or its gradient."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    product = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()
    if bias is not None and not grad:
        product = product + bias
    bias_gradient = b.sum(0) if bias is not None and grad else None
    return product.to(out_dtype or product.dtype), bias_gradient, None, None


def rms_norm(
    inputmat: torch.Tensor, out: Any, weight: torch.Tensor, bias: Any, eps: float, *unused: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The norm, no mean, and 1 / RMS of each row."""
    rsigma = torch.rsqrt(inputmat.float().pow(2).mean(-1) + eps)
    return (inputmat * rsigma[:, None] * weight).to(inputmat.dtype), None, rsigma


def rms_norm_backward(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor, *unused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the input and of the weight."""
    normed = x * rsigma[:, None]
    scaled = dz * weight
    inner = (scaled * normed).mean(-1, keepdim=True)
    return rsigma[:, None] * (scaled - normed * inner), (dz * normed).sum(0)
