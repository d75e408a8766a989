"""Two forms of one model on the same tokens: what each loses, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

Batch = tuple[Tensor, Tensor]
"""Tokens and the tokens that follow them, int64 [1, s]."""


@dataclass(frozen=True)
class Measured:
    """What a model gives for a sequence.

    Attributes:
        logits: FP32 [s, V], on the CPU.
        loss: mean cross entropy.
    """

    logits: Tensor
    loss: float


def random_batches(count: int, length: int, vocabulary: int) -> list[Batch]:
    """Sequences of random tokens, always the same.

    Args:
        count: of sequences.
        length: of each.
        vocabulary: ids below this.
    """
    generator = torch.Generator().manual_seed(1234)
    ids = torch.randint(vocabulary, (count, length + 1), generator=generator)
    return [(each[None, :-1], each[None, 1:]) for each in ids]


def batches_of(dataset: Any, count: int) -> list[Batch]:
    """The first sequences of one of Megatron's GPT data sets, ``count`` or as many as there are."""
    items = [dataset[index] for index in range(min(count, len(dataset)))]
    return [(item["tokens"][None].long(), item["labels"][None].long()) for item in items]


@torch.no_grad()
def measure(model: Any, batches: Sequence[Batch]) -> list[Measured]:
    """Run a whole ``GPTModel`` over sequences, one at a time.

    Args:
        model: in evaluation mode, perhaps wrapped.
        batches: the sequences.
    """
    found = []
    for tokens, labels in batches:
        positions = torch.arange(tokens.shape[1])[None]
        device = torch.device(torch.cuda.current_device())
        (logits,) = model(tokens.to(device), positions.to(device), None)
        logits = logits.float().cpu()
        found.append(Measured(logits, float(cross_entropy(logits, labels[0]))))
    return found


def compared(kept: Sequence[Measured], plain: Sequence[Measured]) -> str:
    """One line on how far two forms of a model are apart.

    Args:
        kept: of the model as it was trained, with boundaries.
        plain: of the model without, for the same sequences.
    """
    loss_kept, loss_plain = (sum(m.loss for m in each) / len(each) for each in (kept, plain))
    largest, square, divergence = 0.0, 0.0, 0.0
    for a, b in zip(kept, plain, strict=True):
        largest = max(largest, float((a.logits - b.logits).abs().max()))
        square += float(a.logits.square().mean()) / len(kept)
        p, q = log_softmax(a.logits, -1), log_softmax(b.logits, -1)
        divergence += float((p.exp() * (p - q)).sum(-1).mean()) / len(kept)
    return (
        f"loss {loss_kept:.6f} with boundaries, {loss_plain:.6f} without "
        f"({loss_plain / loss_kept - 1.0:+.4%}); mean KL divergence {divergence:.3g}; largest "
        f"difference of a logit {largest:.3g}, where their RMS is {square**0.5:.3g}"
    )
