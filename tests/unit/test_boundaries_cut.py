"""A boundary that is cut gives the numbers of one in place, bit for bit."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_taco.boundaries import BoundarySettings, Chain, QuantizerSettings
from tests.unit.boundary_cases import (
    B,
    D,
    R,
    S,
    V,
    chain_boundary,
    noise,
    pass_cut,
    pass_in_place,
    token_ids,
    whole_and_halves,
)

NONE, INT8, INT4 = QuantizerSettings(), QuantizerSettings("int8"), QuantizerSettings("int4")
E4M3 = QuantizerSettings("e4m3", {"rotation": "none"})
RVQ = QuantizerSettings(
    "rvq", {"codes": 8, "rounds": 2, "warmup_steps": 2, "sample": 32, "parts": 4, "decay": 0.5}
)
CASES = {
    "mapl": BoundarySettings("mapl", D, R, V, "factorised"),
    "mapl-plain": BoundarySettings("mapl", D, R),
    "mapl-full": BoundarySettings("mapl", D, R, V, "full"),
    "mapl-int8": BoundarySettings("mapl", D, R, V, "factorised", forward=INT8, backward=INT8),
    "mapl-int4": BoundarySettings("mapl", D, R, forward=INT4, backward=E4M3),
    "mapl-forward": BoundarySettings("mapl", D, R, forward=E4M3),
    "mapl-backward": BoundarySettings("mapl", D, R, backward=INT8),
    "mapl-rvq": BoundarySettings("mapl", D, R, V, "factorised", forward=RVQ, backward=INT8),
    "fixed-rvq": BoundarySettings("fixed", D, R, V, "full", forward=RVQ),
    "unconstrained": BoundarySettings("learned_unconstrained", D, R, V, "static"),
    "subspace": BoundarySettings("subspace", D, R, V, "static", forward=INT8),
    "resbm": BoundarySettings("residual_bottleneck", D, R, forward=INT8, backward=E4M3),
    "taco": BoundarySettings("taco", D),
    "int8_hadamard": BoundarySettings("int8_hadamard", D),
    "tah_quant": BoundarySettings("tah_quant", D),
}
STEPS, MICRO_BATCHES, LR = 4, 3, 0.01


def micro_batch(step: int, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return x, ids and the output's gradient."""
    seed = 100 * step + number
    x, g = noise(S, B, D, seed=seed), noise(S, B, D, seed=seed + 50)
    return x.to(dtype), token_ids(seed), g.to(dtype)


def end_steps(whole: Chain, sender: Chain, receiver: Chain, skipped: bool) -> None:
    """End a step as the training loop does: parts exchanged and added, one replica."""
    boundaries = [chain_boundary(chain) for chain in (whole, sender, receiver)]
    parts = [boundary.gradient_parts() for boundary in boundaries]
    for end, part in parts[0].items():
        assert torch.equal(part, parts[1 if end == "sender" else 2][end])
    gradient = None
    if parts[0]:
        gradient = parts[1]["sender"] + parts[2]["receiver"]
    reports = [
        boundary.end_step(gradient, LR, boundary.statistics(), skipped) for boundary in boundaries
    ]
    assert reports[0] == reports[1] == reports[2]
    states = [boundary.shared_state() for boundary in boundaries]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
        assert torch.equal(value, states[2][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_cut_and_in_place_are_equal_through_steps(name, dtype):
    whole, sender, receiver = whole_and_halves(CASES[name])
    for chain in (whole, sender, receiver):
        chain.to(dtype)
    ends = chain_boundary(sender), chain_boundary(receiver)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            x, ids, g = micro_batch(step, number, dtype)
            here = pass_in_place(chain_boundary(whole), x, ids, g)
            there = pass_cut(*ends, x, ids, g)
            assert torch.equal(here.y, there.y)
            assert torch.equal(here.dx, there.dx)
        end_steps(whole, sender, receiver, skipped=step == 3)
        for chain in (whole, sender, receiver):
            for key, parameter in chain.named_parameters():
                assert parameter.grad is not None, key
                original = dict(whole.named_parameters())[key].grad
                assert torch.equal(parameter.grad, original), key


def test_a_step_can_be_run_again():
    chains = whole_and_halves(CASES["mapl-rvq"])
    once, twice = chains[1:], whole_and_halves(CASES["mapl-rvq"])[1:]
    for step in range(4):
        x, ids, g = micro_batch(step, 0, torch.float32)
        pass_cut(*map(chain_boundary, once), x, ids, g)
        pass_cut(*map(chain_boundary, twice), -x, ids, g)
        for chain in twice:
            chain_boundary(chain).begin_step()
        pass_cut(*map(chain_boundary, twice), x, ids, g)
        for sender, receiver in (once, twice):
            ends = chain_boundary(sender), chain_boundary(receiver)
            parts = ends[0].gradient_parts() | ends[1].gradient_parts()
            gradient = parts["sender"] + parts["receiver"]
            for end in ends:
                end.end_step(gradient, LR, end.statistics())
    for first, second in zip(once, twice, strict=True):
        for name, value in chain_boundary(first).shared_state().items():
            assert torch.equal(value, chain_boundary(second).shared_state()[name])


@pytest.mark.parametrize("training", [False, True])
def test_a_pass_without_gradients_changes_nothing_and_agrees(training):
    """An evaluation, and a pass of a model that is left in training mode."""
    whole, sender, receiver = chains = whole_and_halves(CASES["mapl-rvq"])
    for step in range(4):
        x, ids, g = micro_batch(step, 0, torch.float32)
        pass_in_place(chain_boundary(whole), x, ids, g)
        pass_cut(chain_boundary(sender), chain_boundary(receiver), x, ids, g)
        for chain in chains:
            chain.train(training)
        x, ids, _ = micro_batch(9, 0, torch.float32)
        s, b = x.shape[:2]
        before = [chain_boundary(chain).statistics() for chain in chains]
        with torch.no_grad():
            y = chain_boundary(whole)(x, ids)
            message = chain_boundary(sender).pack(chain_boundary(sender).encode(x, ids))
            assert message.numel() == chain_boundary(receiver).wire_bytes(s, b, torch.float32)
            z = chain_boundary(receiver).unpack(message, s, b, torch.float32)
            assert torch.equal(y, chain_boundary(receiver).decode(z, ids))
        after = [chain_boundary(chain).statistics() for chain in chains]
        for old, new in zip(before, after, strict=True):
            assert (old is None) == (new is None)
            assert old is None or torch.equal(old, new)
        for chain in chains:
            chain.train()
        end_steps(whole, sender, receiver, skipped=False)


def test_recomputation_learns_each_micro_batch_once():
    plain, _, _ = whole_and_halves(CASES["mapl-rvq"])
    repeated, _, _ = whole_and_halves(CASES["mapl-rvq"])
    for step in range(4):
        for number in range(MICRO_BATCHES):
            x, ids, g = micro_batch(step, number, torch.float32)
            first = pass_in_place(chain_boundary(plain), x, ids, g)
            x.requires_grad_()
            y = checkpoint(chain_boundary(repeated), x, ids, use_reentrant=True)
            y.backward(g)
            assert torch.equal(first.y, y)
            assert torch.equal(first.dx, x.grad)
        for chain in (plain, repeated):
            boundary = chain_boundary(chain)
            gradient = sum(boundary.gradient_parts().values())
            boundary.end_step(gradient, LR, boundary.statistics())
    for name, value in chain_boundary(plain).shared_state().items():
        assert torch.equal(value, chain_boundary(repeated).shared_state()[name])


def test_what_crosses_is_not_a_view():
    for settings in CASES.values():
        boundary = chain_boundary(Chain(settings, 1, 0, 0))
        z = boundary.encode(noise(S, B, D).requires_grad_(), token_ids())
        assert z._base is None  # Megatron frees what it has sent
