"""What this machine has of what Megatron and this package need. Nothing here needs a GPU."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from megatron_taco.patching.fingerprints import known
from megatron_taco.patching.inspection import inspect_all, package_root, package_version
from megatron_taco.patching.target import DISTRIBUTIONS, TE_SUPPORTED, TRANSFORMER_ENGINE
from megatron_taco.patching.te_targets import TE_TARGETS

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Fact:
    """One line of the machine table.

    Attributes:
        name: What it is about.
        value: What was found.
        level: `ok`, `note` (worth knowing) or `problem` (training will not start).
    """

    name: str
    value: str
    level: Level = "ok"


def describe_machine(root: Path | None) -> list[Fact]:
    """Collect the facts.

    Args:
        root: The folder that holds `megatron`, or None where it is not installed.
    """
    facts = [Fact("python", platform.python_version())]
    facts += _torch_facts()
    facts.append(_required("triton", "megatron-core imports it, GPU or not: pip install triton"))
    facts.append(
        _required("psutil", "checkpoints need it, and hang or fail without: pip install psutil")
    )
    facts += [_transformer_engine(), _apex()]
    facts.append(_helpers(root))
    facts.append(
        Fact("CUDA_DEVICE_MAX_CONNECTIONS", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"))
    )
    return facts


def planned_repairs(root: Path | None, cuda: bool) -> list[str]:
    """Return the start-up repairs which the trainer will make here, compression on or off.

    Args:
        root: The folder that holds `megatron`, or None where it is not installed.
        cuda: Whether torch has a usable GPU.
    """
    repairs = []
    if root is not None and not _makefile(root).is_file() and _prebuilt(root):
        repairs.append(
            "megatron.core.datasets.utils.compile_helpers does nothing: the wheel has helpers_cpp "
            "prebuilt and no Makefile, and Megatron would exit"
        )
    if not cuda:
        repairs.append(
            "the CPU shim answers torch.cuda for the CPU (run.device auto or cpu), "
            "since there is no GPU"
        )
    return repairs


def has_cuda() -> bool:
    """Whether torch is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _torch_facts() -> list[Fact]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [Fact("torch", f"cannot be imported: {error}", "problem")]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    facts = [Fact("torch", f"{torch.__version__} ({build})")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            facts.append(Fact(f"GPU {index}", f"{name}, compute capability {major}.{minor}"))
    else:
        facts.append(Fact("GPU", "none: only run.device cpu", "note"))
    if dist.is_available() and dist.is_nccl_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()
        facts.append(Fact("NCCL", ".".join(map(str, nccl))))
    else:
        facts.append(Fact("NCCL", "not in this torch: only run.device cpu", "note"))
    gloo = dist.is_available() and dist.is_gloo_available()
    facts.append(
        Fact("gloo", "available")
        if gloo
        else Fact("gloo", "not in this torch: install one that has it", "problem")
    )
    return facts


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _required(name: str, advice: str) -> Fact:
    if util.find_spec(name) is None:
        return Fact(name, f"missing: {advice}", "problem")
    return Fact(name, _version(name) or "installed")


def _transformer_engine() -> Fact:
    name = DISTRIBUTIONS[TRANSFORMER_ENGINE]
    root = package_root(TRANSFORMER_ENGINE)
    if root is None:
        return Fact(name, "not installed (not needed)", "note")
    version = package_version(TRANSFORMER_ENGINE, root) or "installed"
    strange = te_problems()
    if not strange:
        return Fact(name, f"{version}, known: its linears' traffic can be compressed")
    return Fact(
        name,
        f"{version}: {strange[0]}; compression goes with transformer_impl: local alone, or "
        f"install {name}{TE_SUPPORTED}",
        "note",
    )


def te_problems() -> list[str]:
    """What of Transformer Engine is not as we know it, one line each; empty if all is."""
    findings = inspect_all(TE_TARGETS, known(TRANSFORMER_ENGINE), TRANSFORMER_ENGINE)
    return [f"{f.target.name}: {f.detail}" for f in findings if f.status != "ok"]


def _apex() -> Fact:
    """Tell NVIDIA's apex from the web toolkit which has that name on PyPI."""
    spec = util.find_spec("apex")
    if spec is None:
        return Fact("apex", "not installed (not needed)", "note")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if any((folder / part).is_dir() for folder in folders for part in ("contrib", "amp")):
        return Fact("apex", _version("apex") or "installed")
    return Fact(
        "apex",
        "another project of that name (PyPI's apex is a web toolkit; NVIDIA's is built from its "
        "source and is not needed): pip uninstall apex",
        "note",
    )


def _makefile(root: Path) -> Path:
    return root / "megatron" / "core" / "datasets" / "Makefile"


def _prebuilt(root: Path) -> bool:
    return any((root / "megatron" / "core" / "datasets").glob("helpers_cpp*.so"))


def _helpers(root: Path | None) -> Fact:
    name = "dataset helpers"
    if root is None:
        return Fact(name, "megatron-core is not installed", "note")
    if _makefile(root).is_file():
        return Fact(name, "compiled at start-up by Megatron's Makefile")
    if _prebuilt(root):
        return Fact(name, "helpers_cpp prebuilt, no Makefile (a wheel)")
    return Fact(
        name,
        "neither helpers_cpp nor a Makefile: reinstall megatron-core from a wheel for this Python",
        "problem",
    )
