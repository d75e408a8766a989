"""Gradients of inputs, projector and anchors against autograd of the formula in FP64."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_taco.boundaries import BoundarySettings, Chain
from megatron_taco.boundaries.anchors import FactorisedAnchor, FullAnchor, StaticAnchor, look_up
from megatron_taco.boundaries.halves import accumulate_outer_
from megatron_taco.boundaries.projector import Projector
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
    randomise,
    relative_error,
    token_ids,
    whole_and_halves,
)

ANCHORS = ["none", "static", "full", "factorised"]


def projector_of(chain: Chain) -> Projector:
    """Return the projector of boundary 1."""
    projector = chain_boundary(chain).projector
    assert projector is not None
    return projector


def gradient_of(chain: Chain) -> Tensor:
    """Return both parts of the projector's gradient, added."""
    return sum(projector_of(chain).gradient_parts().values(), torch.zeros(()))


def reference(chain: Chain, x: Tensor, ids: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of the formula, by plain autograd in FP64."""
    a = projector_of(chain).a.double().requires_grad_()
    x = x.double().requires_grad_()
    tables, anchors = {}, []
    for segment in (0, 1):
        held = chain.anchor(segment)
        if held is None:
            anchors.append(torch.zeros(S, B, D, dtype=torch.float64))
            continue
        table = held.table.detach().double().requires_grad_()
        tables[f"table {segment}"] = table
        rows = torch.nn.functional.embedding(ids, table).transpose(0, 1)
        anchors.append(rows @ held.basis.double() if isinstance(held, FactorisedAnchor) else rows)
    y = (x - anchors[0]) @ a @ a.t() + anchors[1]
    y.backward(g.double())
    leaves = {"x": x, "a": a, **tables}
    return {"y": y.detach(), **{k: v.grad for k, v in leaves.items() if v.grad is not None}}


def settings_of(anchors: str, kind: str = "mapl") -> BoundarySettings:
    return BoundarySettings(kind, D, R, V, anchors)


@pytest.mark.parametrize("anchors", ANCHORS)
def test_gradients_are_those_of_the_formula(anchors):
    chain = Chain(settings_of(anchors), 1, 0, 1)
    randomise(chain)
    chain.double()
    assert projector_of(chain).a.dtype == torch.float32
    x, ids, g = noise(S, B, D), token_ids(), noise(S, B, D, seed=1)
    expected = reference(chain, x, ids, g)
    got = pass_in_place(chain_boundary(chain), x.double(), ids, g.double())
    assert relative_error(got.y, expected["y"]) < 1e-12
    assert relative_error(got.dx, expected["x"]) < 1e-12
    assert relative_error(gradient_of(chain), expected["a"]) < 1e-6  # accumulated in FP32
    for segment in (0, 1):
        held = chain.anchor(segment)
        if isinstance(held, (FullAnchor, FactorisedAnchor)):
            assert relative_error(held.table.grad, expected[f"table {segment}"]) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_16_bit_gradients_are_near_and_accumulate_in_fp32(dtype, bound):
    chain = Chain(settings_of("factorised"), 1, 0, 1)
    randomise(chain)
    chain.to(dtype)
    x, ids, g = noise(S, B, D).to(dtype), token_ids(), noise(S, B, D, seed=1).to(dtype)
    expected = reference(chain, x, ids, g)
    for _ in range(3):
        got = pass_in_place(chain_boundary(chain), x, ids, g)
    assert relative_error(got.y, expected["y"]) < bound
    assert relative_error(got.dx, expected["x"]) < bound
    assert gradient_of(chain).dtype == torch.float32
    assert relative_error(gradient_of(chain), 3 * expected["a"]) < bound


def test_sums_over_tokens_are_wide_for_16_bit_values():
    left, right = noise(5000, 8).bfloat16(), noise(5000, 4, seed=1).bfloat16()
    total = torch.ones(8, 4)
    accumulate_outer_(total, left, right)
    assert relative_error(total, 1 + left.double().t() @ right.double()) < 1e-5


@pytest.mark.parametrize("anchors", ANCHORS)
def test_the_two_ends_parts_add_up_to_the_gradient(anchors):
    whole, sender, receiver = whole_and_halves(settings_of(anchors))
    x, ids, g = noise(S, B, D), token_ids(), noise(S, B, D, seed=1)
    pass_cut(chain_boundary(sender), chain_boundary(receiver), x, ids, g)
    assert list(projector_of(sender).gradient_parts()) == ["sender"]
    assert list(projector_of(receiver).gradient_parts()) == ["receiver"]
    total = gradient_of(sender) + gradient_of(receiver)
    assert relative_error(total, reference(whole, x, ids, g)["a"]) < 1e-5
    assert relative_error(gradient_of(sender), total) > 0.1  # either alone is biased


@pytest.mark.parametrize("anchors", ANCHORS)
def test_the_inner_product_of_projector_and_gradient_is_symmetric(anchors):
    chain = Chain(settings_of(anchors), 1, 0, 1)
    randomise(chain)
    pass_in_place(chain_boundary(chain), noise(S, B, D), token_ids(), noise(S, B, D, seed=1))
    inner = projector_of(chain).a.t() @ gradient_of(chain)
    assert relative_error(inner, inner.t()) < 1e-5


def test_full_rank_without_anchors_is_the_identity():
    chain = Chain(BoundarySettings("mapl", D, D), 1, 0, 1)
    x, g = noise(S, B, D), noise(S, B, D, seed=1)
    got = pass_in_place(chain_boundary(chain), x, token_ids(), g)
    assert relative_error(got.y, x) < 1e-6
    assert relative_error(got.dx, g) < 1e-6
    a = projector_of(chain).a
    riemannian = gradient_of(chain) - a @ (a.t() @ gradient_of(chain))
    assert float(riemannian.abs().max()) < 1e-4


def test_recomputation_and_micro_batches_count_each_once():
    plain, repeated = (Chain(settings_of("full"), 1, 0, 1) for _ in range(2))
    randomise(plain, repeated)
    for micro_batch in range(3):
        x, ids = noise(S, B, D, seed=micro_batch), token_ids(micro_batch)
        g = noise(S, B, D, seed=10 + micro_batch)
        pass_in_place(chain_boundary(plain), x, ids, g)
        with torch.no_grad():
            chain_boundary(repeated)(x, ids)  # evaluation leaves no trace
        again = x.clone().requires_grad_()
        boundary = chain_boundary(repeated)
        checkpoint(boundary, again, ids, use_reentrant=bool(micro_batch % 2)).backward(g)
    assert torch.equal(gradient_of(plain), gradient_of(repeated))
    first, second = plain.anchor(0), repeated.anchor(0)
    assert torch.equal(first.table.grad, second.table.grad)


def test_a_projector_that_is_not_learned_keeps_no_gradient():
    chain = Chain(settings_of("none", "fixed"), 1, 0, 1)
    pass_in_place(chain_boundary(chain), noise(S, B, D), token_ids(), noise(S, B, D))
    assert projector_of(chain).gradient_parts() == {}
    assert chain_boundary(chain).end_step() is None


def test_a_step_moves_the_projector_and_a_skipped_one_does_not():
    chain = Chain(settings_of("none"), 1, 0, 1)
    boundary, projector = chain_boundary(chain), projector_of(chain)
    before = projector.a.clone()
    pass_in_place(boundary, noise(S, B, D), token_ids(), noise(S, B, D, seed=1))
    assert boundary.end_step(skipped=True) is None
    assert torch.equal(projector.a, before)
    assert not gradient_of(chain).any()
    pass_in_place(boundary, noise(S, B, D), token_ids(), noise(S, B, D, seed=1))
    with pytest.raises(ValueError, match="boundary 1: the projector has no gradient"):
        boundary.end_step()
    report = boundary.end_step(gradient_of(chain), 2e-3)
    assert report is not None
    assert 0 < report.moved < 2.2e-3
    assert projector.steps == 1
    sines = projector.angles_moved().sin()
    assert report.moved == pytest.approx(float(sines.square().mean().sqrt()), rel=1e-3)
    assert float(projector.orthonormality()) < 1e-6
    assert 1e-5 < float(projector.orthonormality(torch.bfloat16)) < 1e-2
    assert not gradient_of(chain).any()
    with pytest.raises(FloatingPointError, match="boundary 1: a projector is not finite"):
        boundary.end_step(torch.full((D, R), torch.nan), 2e-3)


def test_anchors_start_from_zero_or_from_the_embedding():
    weight = noise(V, D)
    full, factorised = FullAnchor(V, D), FactorisedAnchor(V, D, R, seed=0, segment=1)
    ids = token_ids()
    assert not full(ids, torch.float32).any()
    assert not factorised(ids, torch.float32).any()
    full.start_from_embedding(weight)
    assert torch.equal(full(ids, torch.float32), weight[ids].transpose(0, 1))
    factorised.start_from_embedding(weight)
    basis = factorised.basis
    assert float((basis @ basis.t() - torch.eye(R)).abs().max()) < 1e-5
    projected = weight[ids].transpose(0, 1) @ basis.t() @ basis
    assert torch.allclose(factorised(ids, torch.float32), projected, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"embedding is \[11, 3\] from row 0, expected rows of \[11, 64\]"
    ):
        full.start_from_embedding(weight[:, :3])
    with pytest.raises(ValueError, match=r"embedding is \[11, 64\] from row 1, expected rows of"):
        full.start_from_embedding(weight, first=1)
    parts = FullAnchor(V, D)
    parts.start_from_embedding(weight[:4])
    parts.start_from_embedding(weight[4:], first=4)
    assert torch.equal(parts.table, full.table)
    with pytest.raises(ValueError, match="StaticAnchor cannot start from the embedding"):
        StaticAnchor(V, D, 0).start_from_embedding(weight)


def test_static_anchors_are_the_same_everywhere_and_not_saved():
    first, second = StaticAnchor(V, D, seed=3), StaticAnchor(V, D, seed=3)
    assert torch.equal(first.table, second.table)
    assert float(first.table.std()) == pytest.approx(1.0, abs=0.1)
    assert not first.state_dict()
    assert not torch.equal(first.table, StaticAnchor(V, D, seed=4).table)


@pytest.mark.parametrize("ids", [token_ids().int(), token_ids()[0]])
def test_ids_of_another_kind_are_refused(ids):
    with pytest.raises(ValueError, match=r"token ids are .*, expected int64 \[b, s\]"):
        look_up(torch.zeros(V, D), ids)


@pytest.mark.parametrize("ids", [None, token_ids().t().contiguous()])
def test_ids_that_do_not_fit_the_activation_are_refused(ids):
    chain = Chain(settings_of("full"), 1, 0, 1)
    with pytest.raises(ValueError, match=r"boundary 1: token ids are .*, expected \[2, 6\]"):
        chain_boundary(chain)(noise(S, B, D), ids)


def test_a_learned_projector_keeps_what_a_fixed_one_loses():
    mixing = noise(8, D, seed=3) / 3
    left = {}
    for kind in ("mapl", "learned_unconstrained", "fixed"):
        chain = Chain(BoundarySettings(kind, D, 8), 1, 0, 1)
        boundary = chain_boundary(chain)
        for step in range(120):
            x = noise(S, B, 8, seed=step) @ mixing
            y = boundary(x.requires_grad_(), None)
            (y - x.detach()).square().mean().backward()
            gradient = sum(boundary.gradient_parts().values()) if kind != "fixed" else None
            boundary.end_step(gradient, 0.05 * (1 - step / 120))
        left[kind] = relative_error(boundary(x, None), x)
    assert left["fixed"] > 0.8
    assert left["mapl"] < 0.1
    assert left["learned_unconstrained"] < 0.5
