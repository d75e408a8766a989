"""The resolved configuration as YAML text, and as one flat mapping that ranks can compare."""

import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

from megatron_taco.config.yaml_source import plain_scalar

Scalar = str | int | float | bool | None

HOST_ONLY: Final = (
    "run.name",
    "run.dir",
    "run.quiet",
    "data.cache",
    "telemetry.tensorboard",
    "telemetry.wandb",
)
"""Keys that may differ between hosts without changing what the ranks compute or send."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Return the leaves of a tree by dotted key, sorted; a list becomes its JSON text."""
    flat: dict[str, Scalar] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            flat.update(flatten(value, key))
        else:
            flat[key] = json.dumps(value) if isinstance(value, list) else value
    return dict(sorted(flat.items()))


def is_host_only(key: str) -> bool:
    """Return whether a dotted key is one of `HOST_ONLY` or lies inside one."""
    return any(key == host or key.startswith(host + ".") for host in HOST_ONLY)


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return one line per key in which two canonical forms differ, with both values.

    A value and its absence differ, as do 1, 1.0 and true.
    """
    lines = []
    for key in sorted(a.keys() | b.keys()):
        left, right = _shown(a, key), _shown(b, key)
        if left != right:
            lines.append(f"{key}: {left} != {right}")
    return lines


def _shown(canonical: Mapping[str, Any], key: str) -> str:
    return json.dumps(canonical[key]) if key in canonical else "(not set)"


class _Dumper(yaml.SafeDumper):
    """SafeDumper whose output means the same to the YAML 1.2 reader of this package."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(plain_scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return a tree as YAML text that reads back to the same tree."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
