"""Start-up repairs that Megatron itself needs, whether or not anything is compressed.

``initialize_megatron`` always builds the data sets' C++ helpers with ``make``.  A wheel brings them
prebuilt and has no Makefile, so that ``make`` fails and Megatron exits: there the build is skipped.

To load a checkpoint the distributed optimiser reads its own state first, and without Apex and
Transformer Engine it reads the step from torch's Adam, which has none before its first step: an
assertion fails.  There the state is allocated first, as Adam itself would.  After loading, the step
is 0 again or one tensor that all parameters share, which Adam then counts up once for each of them,
so that a resumed run would take other steps than an unbroken one: there each parameter gets the
saved step, in a tensor of its own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_taco.patching.registry import Registry

OWNER = "start-up repair"


def needs_prebuilt_helpers() -> bool:
    """Whether megatron-core brings prebuilt helpers and no Makefile to build them with."""
    spec = importlib.util.find_spec("megatron.core.datasets")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(next(iter(spec.submodule_search_locations)))
    return not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*.so"))


def _skip_build(original: Callable[..., Any], hit: Callable[[], None]) -> Callable[..., Any]:
    def compile_helpers() -> None:
        hit()

    return compile_helpers


def lacks_fused_adam() -> bool:
    """Whether Megatron found neither Apex nor Transformer Engine and uses torch's Adam."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def _allocate_first(original: Callable[..., Any], hit: Callable[[], None]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        optimizer = self.optimizer
        if not optimizer.state and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            hit()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original(self)

    return state_dict


def _own_steps(original: Callable[..., Any], hit: Callable[[], None]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        hit()
        original(self, state_dict)
        steps = {group.get("step") for group in state_dict["optimizer"]["param_groups"]}
        for state in self.optimizer.state.values():
            if "step" in state and len(steps) == 1 and None not in steps:
                state["step"] = torch.tensor(float(*steps), dtype=torch.float32)

    return load_state_dict


def repair(registry: Registry) -> None:
    """Claim the repairs this installation needs; nothing changes until the registry is applied."""
    if needs_prebuilt_helpers():
        registry.claim("startup.compile_helpers", OWNER, _skip_build)
    if lacks_fused_adam():
        registry.claim("startup.distributed_optimizer_state", OWNER, _allocate_first)
        registry.claim("startup.distributed_optimizer_steps", OWNER, _own_steps)
