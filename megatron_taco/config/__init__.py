"""Configuration: one YAML file and overrides, checked strictly, without torch or megatron-core."""

from megatron_taco.config.canonical import diff
from megatron_taco.config.config import Config
from megatron_taco.config.drop_in import load_settings
from megatron_taco.config.errors import ConfigError, Problem
from megatron_taco.config.loader import load
from megatron_taco.config.presets import PRESETS, count_parameters
from megatron_taco.config.settings import Settings
from megatron_taco.config.tokenizer import Tokenizer

__all__ = [
    "PRESETS",
    "Config",
    "ConfigError",
    "Problem",
    "Settings",
    "Tokenizer",
    "count_parameters",
    "diff",
    "load",
    "load_settings",
]
