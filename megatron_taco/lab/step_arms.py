"""The arms of ``bench step``: what each does on each parallel axis, and its configuration."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_taco.config import Config, ConfigError, load
from megatron_taco.config.gradient_methods import METHOD_SETTINGS, SPARSELOCO
from megatron_taco.config.megatron_section import whole
from megatron_taco.config.pipeline_parallel import ELEMENTWISE, PipelineParallel
from megatron_taco.lab.link import LabError
from megatron_taco.lab.step_schedule import FP32, PLAIN, SILENT
from megatron_taco.patching import conflicts

TENSOR, PIPELINE, DATA, ALL = "tensor", "pipeline", "data", "all"
AXES: Final = (TENSOR, PIPELINE, DATA, ALL)

_KINDS: Final = tuple(typing.get_args(PipelineParallel.model_fields["boundary"].annotation))
_QUANTIZERS: Final = ("int8", "int4", "e4m3", "rvq")
BOUNDARIES: Final = (
    *_KINDS,
    *(f"{kind}+{code}" for kind in _KINDS if kind not in ELEMENTWISE for code in _QUANTIZERS),
)
"""Arms of the pipeline: a kind of boundary, and a quantiser of what it projects to."""

_TACO: Final = ("e4m3", "e5m2", "int8", "int6", "int4")
_INTEGERS: Final = ("block_int8", "block_int6", "block_int4")
_METHODS: Final = tuple(name for name in METHOD_SETTINGS if name != SPARSELOCO)
COMPRESSORS: Final = ("sdp4bit", *_TACO, *_INTEGERS, *_METHODS)
"""Arms of data parallelism: SDP4Bit, TACO's formats, block integers, gradient methods.

SparseLoCo is none of them: its replicas step apart, and most of its steps send nothing.
"""

_RANK_SHARE: Final = 8
"""Hidden size / rank of a projection, unless the configuration has a rank."""
_NEVER: Final = 2**40
"""A step that no benchmark reaches."""
_PIPELINE: Final = "compression.pipeline_parallel"
_DATA: Final = "compression.data_parallel"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one arm does: on each axis ``plain``, ``silent`` or a compressed form."""

    name: str
    tensor: str = PLAIN
    pipeline: str = PLAIN
    data: str = PLAIN


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes of a run."""

    tensor: int
    pipeline: int
    data: int

    @classmethod
    def of(cls, config: Config, ranks: int) -> Layout:
        """Returns the sizes that Megatron works out; 0 data-parallel ranks if they do not fit."""
        names = ("tensor_model", "pipeline_model", "context")
        sizes = [whole(config.megatron.get(f"{name}_parallel_size")) or 1 for name in names]
        return cls(
            tensor=sizes[0], pipeline=sizes[1], data=ranks // (sizes[0] * sizes[1] * sizes[2])
        )

    def axes(self, axis: str) -> tuple[str, ...]:
        """Returns the axes that are measured.

        Raises:
            LabError: An axis that is asked for is not there.
        """
        sizes = {TENSOR: self.tensor, PIPELINE: self.pipeline, DATA: self.data}
        there = tuple(name for name, size in sizes.items() if size > 1)
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        if axis == ALL and len(there) < 2:
            raise LabError(
                f"--axis all needs two axes of more than one rank, found {told}; set "
                "megatron.tensor_model_parallel_size and pipeline_model_parallel_size, or start "
                "more ranks"
            )
        if axis in (PIPELINE, DATA) and axis not in there:
            change = {
                PIPELINE: "set megatron.pipeline_model_parallel_size to 2 or more",
                DATA: "start more ranks, or lower megatron.tensor_model_parallel_size or "
                "pipeline_model_parallel_size",
            }
            raise LabError(
                f"--axis {axis}: nothing is sent on this axis with parallel sizes {told}; "
                f"{change[axis]}"
            )
        return there if axis == ALL else (axis,)


def arms_of(
    axis: str,
    axes: Iterable[str],
    *,
    formats: Sequence[str],
    boundaries: Sequence[str],
    compressors: Sequence[str],
) -> list[Arm]:
    """Returns the compressed arms and the silent one, in the order of their turns.

    Args:
        axis: One of ``AXES``.
        axes: The axes that it comes to in this run.
        formats: Of the tensor axis; ``fp32`` in ``all`` is an arm of its own.
        boundaries: Of the pipeline.
        compressors: Of data parallelism. Of each list ``all`` takes the first.
    """
    named = {TENSOR: formats, PIPELINE: boundaries, DATA: compressors}
    if axis == ALL:
        first = {name: next(n for n in named[name] if n != FP32) for name in axes}
        found = [Arm(name=ALL, **first)]
        found += [Arm(name=name, **{name: code}) for name, code in first.items()]
        if TENSOR in axes and FP32 in formats:
            found.append(Arm(name=FP32, tensor=FP32))
    else:
        found = [Arm(name=code, **{axis: code}) for code in named[axis]]
    return [*found, Arm(name=SILENT, **dict.fromkeys(axes, SILENT))]


@dataclass(frozen=True, kw_only=True)
class ArmConfigs:
    """Configurations of the arms of an axis, by what they do there.

    Attributes:
        pipeline: With each of the pipeline's boundaries.
        data: With each of the compressors of data parallelism, and ``plain``, whose hooks count
            and never compress.
    """

    pipeline: dict[str, Config]
    data: dict[str, Config]


def configs(
    path: Path, overrides: Sequence[str], config: Config, arms: Sequence[Arm], axes: Sequence[str]
) -> ArmConfigs:
    """Returns what the arms are configured as, checked as the trainer checks it.

    Args:
        path: The configuration's file.
        overrides: Of the run itself.
        config: What they make.
        arms: All arms.
        axes: The axes that are measured.

    Raises:
        ConfigError: An arm is not possible in this configuration.
        LabError: Megatron overlaps what belongs to one model, and there are several.
    """
    boundaries = dict.fromkeys(arm.pipeline for arm in arms)
    compressors = dict.fromkeys(arm.data for arm in arms)
    found = ArmConfigs(pipeline={}, data={})
    for name in boundaries:
        if name not in (PLAIN, SILENT):
            found.pipeline[name] = _checked(path, [*overrides, *_boundary(name, config)])
    if found.pipeline:
        _refuse_overlap(config)
    for name in compressors:
        if name not in (PLAIN, SILENT):
            found.data[name] = _checked(path, [*overrides, *_compressor(name, config)])
    if DATA in axes:
        never = [*_compressor("e4m3", config), f"{_DATA}.start_step={_NEVER}"]
        found.data[PLAIN] = load(path, [*overrides, *never])
    return found


def _checked(path: Path, overrides: Sequence[str]) -> Config:
    config = load(path, overrides)
    if refused := conflicts.check(config):
        raise ConfigError(refused)
    return config


def _refuse_overlap(config: Config) -> None:
    """The training loop ties these to the one model that it knows of."""
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if config.megatron.get(name) is True:
            raise LabError(
                f"megatron.{name}: true does not go with --axis pipeline or all: a boundary is "
                "part of the model, so several models take turns, and Megatron's loop overlaps "
                f"those of one; set megatron.{name}=false"
            )


def _boundary(name: str, config: Config) -> list[str]:
    kind, _, code = name.partition("+")
    values: dict[str, object] = {"mode": "on", "boundary": kind}
    if kind not in ELEMENTWISE:
        if kind != "residual_bottleneck":
            values["check_every"] = 0
        if config.compression.pipeline_parallel.rank is None:
            hidden = config.model.hidden_size
            values["rank"] = max(1, (hidden or _RANK_SHARE) // _RANK_SHARE)
    if code:
        values["quantizer.forward.kind"] = code
        values["quantizer.backward.kind"] = "int8" if code == "rvq" else code
    if code == "rvq":
        values["quantizer.forward.warmup_steps"] = 1
    return [f"{_PIPELINE}.{key}={value}" for key, value in values.items()]


def _compressor(name: str, config: Config) -> list[str]:
    values: dict[str, object] = {"mode": "on", "start_step": 0}
    if name in _TACO:
        codec: dict[str, object] = {"compressor": "taco", "format": name}
    elif name in _INTEGERS:
        codec = {"compressor": "block_integer", "bits": int(name.removeprefix("block_int"))}
    else:
        codec = {"compressor": name}
    values |= {f"gradients.{key}": value for key, value in codec.items()}
    if name in _METHODS:  # weights stay what the configuration says
        return [f"{_DATA}.{key}={value}" for key, value in values.items()]
    if config.megatron.get("use_distributed_optimizer") is not True:
        codec = {"compressor": "none"}
    values |= {f"weights.{key}": value for key, value in codec.items()}
    return [f"{_DATA}.{key}={value}" for key, value in values.items()]


def world_size() -> int:
    """Returns the number of ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])
