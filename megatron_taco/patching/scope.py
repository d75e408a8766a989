"""Which role a tensor-parallel collective has, known from where Megatron issues it.

A role is what the tensor *is*, not the pass it moves in (contract 9): the re-gather of a layer's
input for the weight gradient carries a forward activation.  Two facts give the role: the kind of
module that is running (a hidden layer's linear, the embedding, the output layer), set by the
wrapped ``forward`` of those modules and carried to the backward pass by the autograd function's
context; and the autograd function that issues the collective.  Where either is unknown the
collective has no role and goes plain.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Literal

Kind = Literal["linear", "embedding", "output_layer"]
Pass = Literal["forward", "backward"]

FORWARD = "tp.forward"
BACKWARD = "tp.backward"
EMBEDDING = "tp.embedding"
OUTPUT_LAYER = "tp.output_layer"


def role_of(kind: Kind, tensor: Pass) -> str:
    """The role of a tensor of the forward or backward pass in a module of this kind."""
    if kind == "embedding":
        return EMBEDDING
    if kind == "output_layer":
        return OUTPUT_LAYER
    return FORWARD if tensor == "forward" else BACKWARD


class Scope(threading.local):
    """The module kind and the roles in force in this thread (autograd may use several)."""

    kind: Kind | None = None
    roles: Mapping[str, Pass] | None = None

    def role_of_a(self, tensor: Pass) -> str | None:
        """The role of a tensor of that pass in the module that is running, or None in none."""
        return None if self.kind is None else role_of(self.kind, tensor)

    def role(self, collective: str) -> str | None:
        """The role of a collective issued now, or None when it is not one of ours."""
        if self.kind is None or self.roles is None or collective not in self.roles:
            return None
        return role_of(self.kind, self.roles[collective])

    @contextlib.contextmanager
    def module(self, kind: Kind) -> Iterator[None]:
        """A module of this kind runs its forward pass."""
        saved, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = saved

    @contextlib.contextmanager
    def function(self, kind: Kind | None, roles: Mapping[str, Pass]) -> Iterator[None]:
        """An autograd function created in a module of ``kind`` runs one of its passes.

        Args:
            kind: the module kind noted when the function ran forward.
            roles: for each collective which the pass may issue, the pass its tensor belongs to.
        """
        saved = self.kind, self.roles
        self.kind, self.roles = kind, roles
        try:
            yield
        finally:
            self.kind, self.roles = saved
