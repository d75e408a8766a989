"""Which chunk has which boundaries, and messages as bytes."""

import pytest
import torch

from megatron_taco.patching.boundary_layout import resolve_depths, span
from megatron_taco.patching.boundary_message import MessageForm
from megatron_taco.patching.errors import BoundaryError


def test_chunks_of_a_model_share_its_boundaries_at_their_ends() -> None:
    depths = (2, 4, 6, 8)
    first, middle, last = span(depths, 0, 4), span(depths, 4, 6), span(depths, 6, 10)
    assert (first.at_start, first.inside, first.at_end) == (None, {2: 1}, 2)
    assert (middle.at_start, middle.inside, middle.at_end) == (2, {}, 3)
    assert (last.at_start, last.inside, last.at_end) == (3, {8: 4}, None)
    whole = span(depths, 0, 10)
    assert (whole.first, whole.last, whole.inside) == (0, 4, {2: 1, 4: 2, 6: 3, 8: 4})


def test_depths_are_the_cuts_or_hold_them() -> None:
    assert resolve_depths(None, (3, 6), 9) == (3, 6)
    assert resolve_depths([2, 3, 6], (3, 6), 9) == (2, 3, 6)


@pytest.mark.parametrize(
    ("after_layers", "cuts", "message"),
    [
        (None, (), "with one pipeline stage there is no cut"),
        ([4], (3, 6), r"cut after layers \[3, 6\], and \[3, 6\] are not among .* \[4\]"),
        ([3, 9], (3,), r"\[9\] of \[3, 9\]: allowed are 1 \.\. 8"),
    ],
)
def test_depths_that_do_not_fit_are_refused_with_the_list(
    after_layers: list[int] | None, cuts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(BoundaryError, match=message):
        resolve_depths(after_layers, cuts, 9)


@pytest.mark.parametrize("vocab", [None, 2**16, 2**16 + 1])
@pytest.mark.parametrize("size", [0, 24, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_come_apart_again(vocab: int | None, size: int, dtype: torch.dtype) -> None:
    """Also ids above 2^15, and payloads that fill no whole elements."""
    form, s, b = MessageForm(vocab), 3, 2
    payload = torch.arange(size, dtype=torch.uint8)
    ids = torch.tensor([[0, 40000, 65535], [1, 2, 32768]])
    if vocab is not None:
        ids[0, 0] = vocab - 1
    message = form.join(payload, ids, dtype)
    assert message.dtype == dtype
    assert message.numel() == form.elements(size, s, b, dtype, ids=True)
    width = 0 if vocab is None else 2 if vocab == 2**16 else 4
    assert 0 <= message.numel() * dtype.itemsize - size - 6 * width < dtype.itemsize
    arrived, tokens = form.split(message, size, s, b, ids=True)
    assert torch.equal(arrived, payload)
    assert tokens is None if vocab is None else torch.equal(tokens, ids)


def test_gradients_carry_no_ids() -> None:
    form = MessageForm(100)
    assert form.elements(24, 3, 2, torch.float32, ids=False) == 6
    assert form.split(torch.zeros(6), 24, 3, 2, ids=False)[1] is None
