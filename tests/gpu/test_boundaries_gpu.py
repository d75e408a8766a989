"""Boundaries on a GPU: wide sums, reproducible scatter, equal ends, no synchronisation."""

from collections.abc import Iterator

import pytest
import torch

from megatron_taco.boundaries import Chain
from megatron_taco.boundaries.halves import accumulate_outer_
from megatron_taco.boundaries.random import random_bits
from megatron_taco.boundaries.scatter import segment_sum
from megatron_taco.boundaries.spel import spel_step
from megatron_taco.boundaries.state import fingerprint
from megatron_taco.boundaries.stiefel import haar
from tests.unit.boundary_cases import (
    B,
    D,
    S,
    chain_boundary,
    noise,
    pass_cut,
    pass_in_place,
    relative_error,
    token_ids,
    whole_and_halves,
)
from tests.unit.test_boundaries_cut import CASES

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture
def sync_mode_restored() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_projector_gradients_are_summed_in_fp32(dtype):
    left, right = noise(8192, 512).to(dtype), noise(8192, 64, seed=1).to(dtype)
    total = torch.ones(512, 64, device=DEVICE)
    accumulate_outer_(total, left.to(DEVICE), right.to(DEVICE))
    assert relative_error(total.cpu(), 1 + left.double().t() @ right.double()) < 1e-5


def test_segment_sum_is_reproducible():
    keys = (random_bits(1, 100_000, DEVICE) >> 1).abs() % 37
    rows = noise(100_000, 64).to(DEVICE)
    first = segment_sum(rows, keys, 37)
    for _ in range(5):
        assert torch.equal(first, segment_sum(rows, keys, 37))
    on_cpu = segment_sum(rows.cpu().double(), keys.cpu(), 37)
    assert relative_error(first.cpu(), on_cpu) < 1e-6


def test_random_numbers_and_fingerprints_are_those_of_the_cpu():
    assert torch.equal(random_bits(5, 1000, DEVICE).cpu(), random_bits(5, 1000))
    x = noise(1000)
    assert int(fingerprint(x.to(DEVICE))) == int(fingerprint(x))


def test_spel_steps_are_equal_at_two_ends_and_stay_on_the_manifold():
    start = haar(1024, 256, 0, 0).to(DEVICE)
    ends = [(start, torch.zeros_like(start)) for _ in range(2)]
    for step in range(50):
        g = noise(1024, 256, seed=step).to(DEVICE)
        results = [spel_step(a, m, g.clone(), 2e-3) for a, m in ends]
        assert all(not report.repaired for _, _, report in results)
        ends = [(a, m) for a, m, _ in results]
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def to_device(*chains: Chain) -> None:
    for chain in chains:
        chain.to(device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_cut_and_in_place_are_equal(name):
    whole, sender, receiver = chains = whole_and_halves(CASES[name])
    to_device(*chains)
    for step in range(3):
        x, ids, g = (
            each.to(DEVICE)
            for each in (
                noise(S, B, D, seed=step).bfloat16(),
                token_ids(step),
                noise(S, B, D, seed=50 + step).bfloat16(),
            )
        )
        here = pass_in_place(chain_boundary(whole), x, ids, g)
        there = pass_cut(chain_boundary(sender), chain_boundary(receiver), x, ids, g)
        assert torch.equal(here.y, there.y)
        assert torch.equal(here.dx, there.dx)
        parts = chain_boundary(sender).gradient_parts() | chain_boundary(receiver).gradient_parts()
        gradient = parts["sender"] + parts["receiver"] if parts else None
        for chain in chains:
            boundary = chain_boundary(chain)
            boundary.end_step(gradient, 0.01, boundary.statistics())
        for key, value in chain_boundary(whole).shared_state().items():
            assert torch.equal(value, chain_boundary(sender).shared_state()[key])
            assert torch.equal(value, chain_boundary(receiver).shared_state()[key])


@pytest.mark.parametrize("name", ["mapl", "mapl-int8", "mapl-rvq", "taco", "int8_hadamard"])
def test_a_micro_batch_does_not_synchronise(name, sync_mode_restored):
    whole, sender, receiver = chains = whole_and_halves(CASES[name])
    to_device(*chains)
    x, g = noise(S, B, D).bfloat16().to(DEVICE), noise(S, B, D, seed=1).bfloat16().to(DEVICE)
    ids = token_ids().to(DEVICE)
    for _ in range(3):  # past the warm-up of the codebook
        pass_in_place(chain_boundary(whole), x, ids, g)
        pass_cut(chain_boundary(sender), chain_boundary(receiver), x, ids, g)
        parts = chain_boundary(whole).gradient_parts()
        gradient = sum(parts.values()) if parts else None
        for chain in chains:
            boundary = chain_boundary(chain)
            boundary.end_step(gradient, 0.01, boundary.statistics())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    pass_in_place(chain_boundary(whole), x, ids, g)
    pass_cut(chain_boundary(sender), chain_boundary(receiver), x, ids, g)
