"""One hook on the construction of ``GPTModel`` for all axes that have to see a new model.

A place in Megatron has one owner; this is the owner of that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_taco.patching.registry import Registry

OWNER = "compression"
TARGET = "tensor.gpt_init"

Hit = Callable[[], None]
Listener = Callable[[Any], None]


class ModelInit:
    """Calls listeners with each ``GPTModel`` once it is built, before anything wraps it.

    Args:
        listeners: called in order.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def _init(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(this: Any, *args: Any, **kwargs: Any) -> None:
            hit()
            original(this, *args, **kwargs)
            for listener in self._listeners:
                listener(this)

        return __init__

    def claim(self, registry: Registry) -> None:
        """Claim the target; nothing is replaced until the registry is applied."""
        registry.claim(TARGET, OWNER, self._init)
