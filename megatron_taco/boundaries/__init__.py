"""Pipeline boundaries: what is sent between stages, and the state that both ends keep.

Plain torch on any device, no process groups: the caller moves the bytes and reduces gradients and
statistics.
"""

from megatron_taco.boundaries.boundary import Boundary, Place
from megatron_taco.boundaries.build import (
    KINDS,
    QUANTIZER_KINDS,
    BoundarySettings,
    QuantizerSettings,
    build,
)
from megatron_taco.boundaries.chain import Chain
from megatron_taco.boundaries.projector import Projector
from megatron_taco.boundaries.rvq_settings import RvqSettings
from megatron_taco.boundaries.spel import StepReport

__all__ = [
    "KINDS",
    "QUANTIZER_KINDS",
    "Boundary",
    "BoundarySettings",
    "Chain",
    "Place",
    "Projector",
    "QuantizerSettings",
    "RvqSettings",
    "StepReport",
    "build",
]
