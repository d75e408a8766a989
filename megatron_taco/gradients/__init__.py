"""Data-parallel gradient methods with memory, one file each; see ``method.py``."""

from megatron_taco.gradients.cd_adam import CDAdam
from megatron_taco.gradients.homomorphic import Homomorphic
from megatron_taco.gradients.method import GradientMethod
from megatron_taco.gradients.pactrain import PacTrain
from megatron_taco.gradients.powersgd import PowerSGD
from megatron_taco.gradients.sparseloco import SparseLoCo
from megatron_taco.gradients.tagc import TAGC
from megatron_taco.gradients.topk import TopK

__all__ = ["METHODS", "GradientMethod"]

METHODS: dict[str, type[GradientMethod]] = {
    kind.name: kind for kind in (PowerSGD, TopK, SparseLoCo, TAGC, PacTrain, Homomorphic, CDAdam)
}
