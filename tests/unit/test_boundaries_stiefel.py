"""Points, tangents and steps on the Stiefel manifold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.boundaries.spel import muon_step, spel_step
from megatron_taco.boundaries.stiefel import (
    haar,
    msign,
    orthonormalise,
    orthonormality_error,
    principal_angles,
    retract,
    tangent,
)
from tests.unit.boundary_cases import noise

D, R = 48, 12


def polar(x: torch.Tensor) -> torch.Tensor:
    """Return the polar factor by a singular value decomposition in FP64."""
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ v


def test_the_initial_projector_is_orthonormal_and_belongs_to_its_boundary():
    a = haar(D, R, seed=1, boundary=2)
    assert a.dtype == torch.float32
    assert float(orthonormality_error(a)) < 1e-6
    assert torch.equal(a, haar(D, R, seed=1, boundary=2))
    for other in (haar(D, R, 1, 3), haar(D, R, 2, 2)):
        assert float(principal_angles(a, other)[0]) > 0.1
    assert torch.equal(haar(D, D, 1, 2), haar(D, D, 1, 2))


def test_haar_points_have_no_preferred_sign_or_place():
    points = torch.stack([haar(5, 2, seed, 0) for seed in range(600)]).double()
    assert float(points.mean(0).abs().max()) < 0.08
    assert points.square().mean(0).flatten().tolist() == pytest.approx([0.2] * 10, abs=0.05)


@pytest.mark.parametrize("rank", [0, 6])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank is {rank}, allowed is 1 .. 5 \(the hidden size\)"):
        haar(5, rank, 0, 0)


@settings(max_examples=20, deadline=None, database=None)
@given(st.integers(0, 1000), st.integers(1, 8))
def test_tangents_are_tangent_and_projecting_twice_changes_nothing(seed, rank):
    a = haar(8, rank, seed, 0).double()
    t = tangent(a, noise(8, rank, seed=seed).double())
    assert float((a.t() @ t + t.t() @ a).abs().max()) < 1e-6
    assert torch.allclose(tangent(a, t), t, atol=1e-6)


def test_msign_approaches_the_polar_factor():
    m = noise(D, R)
    assert float((msign(m, 8) - polar(m)).abs().max()) < 1e-5
    assert float((msign(m.double(), 12) - polar(m)).abs().max()) < 1e-12
    values = torch.linalg.svdvals(msign(m))
    assert 0.8 < float(values.min()) <= float(values.max()) < 1.2


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e30])
def test_msign_does_not_depend_on_scale(scale):
    m = noise(D, R)
    assert torch.allclose(msign(m * scale), msign(m), atol=1e-5)


def test_msign_of_zero_is_zero():
    assert torch.equal(msign(torch.zeros(D, R)), torch.zeros(D, R))


@pytest.mark.parametrize("length", [2e-3, 0.1, 0.25])
def test_retraction_reaches_the_polar_factor(length):
    a = haar(D, R, 0, 0)
    for direction in (msign(noise(D, R)), a, -a):
        x = a - length * direction
        assert float((retract(x) - polar(x)).abs().max()) < 1e-6
        assert float(orthonormality_error(retract(x))) < 2e-6


def test_orthonormalise_repairs_and_keeps_the_subspace():
    a = haar(D, R, 0, 0)
    spoilt = a + 1e-3 * noise(D, R)
    repaired = orthonormalise(spoilt)
    assert float(orthonormality_error(repaired)) < 1e-6
    assert float(principal_angles(orthonormalise(spoilt.double()), repaired)[-1]) < 1e-5
    assert float((repaired - a).abs().max()) < 1e-2


def test_principal_angles_of_known_subspaces():
    a = torch.eye(6, 2).double()
    b = a.clone()
    small, large = 1e-7, 1.2
    b[:, 0] = torch.tensor([math.cos(small), 0, math.sin(small), 0, 0, 0])
    b[:, 1] = torch.tensor([0, math.cos(large), 0, math.sin(large), 0, 0])
    assert principal_angles(a, b).tolist() == pytest.approx([small, large], rel=1e-6)


def test_spel_follows_its_equations():
    a, m, g = haar(D, R, 0, 0).double(), noise(D, R, seed=1).double(), noise(D, R, seed=2).double()
    new, momentum, report = spel_step(a, m, g, 0.01, beta=0.9)
    inner = a.t() @ g
    expected = 0.9 * m + 0.1 * (g - a @ (inner + inner.t()) / 2)
    assert torch.allclose(momentum, expected, atol=1e-14)
    assert torch.allclose(new, polar(a - 0.01 * msign(expected)), atol=1e-9)
    angles = principal_angles(a, new)
    assert report.moved == pytest.approx(float(angles.sin().square().mean().sqrt()), rel=1e-6)
    assert not report.repaired


def test_the_master_stays_orthonormal_for_a_thousand_steps():
    a, m, worst = haar(D, R, 0, 0), torch.zeros(D, R), 0.0
    for step in range(1000):
        a, m, report = spel_step(a, m, noise(D, R, seed=step), 2e-3)
        worst = max(worst, report.orthonormality)
        assert not report.repaired
    assert worst < 1e-5
    assert float(principal_angles(haar(D, R, 0, 0), a)[-1]) > 0.1


def test_spel_finds_a_principal_subspace():
    target = haar(D, R, 5, 0)
    matrix = target @ target.t() + 0.1 * torch.eye(D)
    a, m = haar(D, R, 0, 0), torch.zeros(D, R)
    before = float(principal_angles(a, target)[-1])
    for step in range(400):
        a, m, _ = spel_step(a, m, -2 * matrix @ a, 0.05 * (1 - step / 400))
    assert float(principal_angles(a, target)[-1]) < 0.05 * before


def test_two_ends_stay_equal_to_the_bit():
    ends = [(haar(D, R, 0, 0), torch.zeros(D, R)) for _ in range(2)]
    for step in range(100):
        g = noise(D, R, seed=step)
        ends = [spel_step(a, m, g.clone(), 2e-3)[:2] for a, m in ends]
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_drift_is_repaired_and_reported():
    a = haar(D, R, 0, 0)
    spoilt = a.clone()
    spoilt[:, 0] *= 0.2  # beyond what the retraction undoes in one step
    new, _, report = spel_step(spoilt, torch.zeros(D, R), noise(D, R), 0.0)
    assert report.repaired
    assert report.orthonormality > 1e-4
    assert float(orthonormality_error(new)) < 1e-6


def test_steps_refuse_what_they_cannot_do():
    a, m = haar(D, R, 0, 0), torch.zeros(D, R)
    with pytest.raises(ValueError, match=r"lr is 0.5, allowed is 0 .. 0.25"):
        spel_step(a, m, m, 0.5)
    with pytest.raises(ValueError, match=r"gradient of a projector is torch.float32\[12, 12\]"):
        spel_step(a, m, m[:12], 0.1)
    with pytest.raises(ValueError, match=r"momentum of a projector is torch.float64"):
        spel_step(a, m.double(), m, 0.1)
    with pytest.raises(FloatingPointError, match="not finite"):
        spel_step(a, m, m + float("nan"), 0.1)


def test_muon_moves_without_the_manifold():
    a, m = haar(D, R, 0, 0), torch.zeros(D, R)
    new, momentum, report = muon_step(a, m, noise(D, R), 0.02)
    assert torch.allclose(momentum, 0.05 * noise(D, R))
    step = (a - new) / (0.02 * (D / R) ** 0.5)
    assert torch.allclose(step, msign(noise(D, R)), atol=1e-4)
    assert report.orthonormality > 1e-3
    assert not report.repaired
