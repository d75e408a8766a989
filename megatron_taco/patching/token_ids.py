"""The token ids of the micro-batch that runs, also where its layers are run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class TokenIds:
    """Holds int64 [b, s], or None outside of a model chunk's forward pass."""

    def __init__(self) -> None:
        self.current: Tensor | None = None

    @contextmanager
    def during(self, ids: Tensor | None) -> Iterator[None]:
        """Make ``ids`` the current ones for a while."""
        before, self.current = self.current, ids
        try:
            yield
        finally:
            self.current = before

    def checkpoint(
        self, original: Callable[..., Any], hit: Callable[[], None]
    ) -> Callable[..., Any]:
        """Wrap Megatron's activation checkpointing: what is run again finds the ids it began with.

        By then other micro-batches have been through the chunk.
        """

        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            hit()
            ids = self.current
            if ids is None:
                return original(function, *args, **kwargs)

            @functools.wraps(function)
            def with_ids(*inputs: Any) -> Any:
                with self.during(ids):
                    return function(*inputs)

            return original(with_ids, *args, **kwargs)

        return checkpoint
