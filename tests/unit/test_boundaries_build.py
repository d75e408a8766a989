"""Settings, what a model chunk holds, its state, and the boundaries beside MAPL."""

from dataclasses import replace

import pytest
import torch

from megatron_taco.boundaries import KINDS, BoundarySettings, Chain, QuantizerSettings, build
from megatron_taco.boundaries.anchors import StaticAnchor
from megatron_taco.boundaries.subspace import Subspace
from tests.unit.boundary_cases import (
    B,
    D,
    R,
    S,
    V,
    chain_boundary,
    noise,
    pass_in_place,
    randomise,
    relative_error,
    token_ids,
)

RVQ = QuantizerSettings("rvq", {"codes": 4, "sample": 8, "warmup_steps": 1})
FULL = BoundarySettings("mapl", D, R, V, "factorised", forward=RVQ)


def test_all_kinds_can_be_had_and_are_named():
    expected = {"mapl", "fixed", "learned_unconstrained", "subspace", "residual_bottleneck"}
    assert set(KINDS) == expected | {"taco", "int8_hadamard", "tah_quant"}
    for kind in KINDS:
        rank = 0 if kind in ("taco", "int8_hadamard", "tah_quant") else R
        anchors = "static" if kind == "subspace" else "none"
        boundary = chain_boundary(Chain(BoundarySettings(kind, D, rank, V, anchors), 1, 0, 1))
        assert boundary.kind == kind
        assert boundary.wire_shape(5, 3) == (5, 3, rank or D)
        assert boundary.needs_ids == (kind == "subspace")


def test_a_chunk_holds_its_segments_and_the_halves_at_its_ends():
    chain = Chain(FULL, 4, 1, 2)
    assert [chain_boundary(chain, i).place.ends for i in (1, 2, 3)] == [
        "receiver",
        "both",
        "sender",
    ]
    assert chain.boundary(4) is None
    assert chain.anchor(0) is None
    assert chain.anchor(1) is not None
    assert set(dict(chain.named_parameters())) == {"anchors.1.table", "anchors.2.table"}
    whole = Chain(FULL, 4, 0, 4)
    assert set(chain.state_dict()) < set(whole.state_dict())
    for key, value in chain.state_dict().items():
        if torch.is_tensor(value):
            assert torch.equal(value, whole.state_dict()[key]), key


def test_a_table_serves_both_boundaries_of_its_segment():
    chain = Chain(BoundarySettings("mapl", D, R, V, "full"), 2, 1, 1)
    randomise(chain)
    table = chain.anchor(1)
    received = chain_boundary(chain, 1).decode(torch.zeros(S, B, R), token_ids())
    assert torch.equal(received, table(token_ids(), torch.float32))
    sent = chain_boundary(chain, 2).encode(received, token_ids())
    assert not sent.any()


def test_static_tables_are_held_once():
    chain = Chain(BoundarySettings("mapl", D, R, V, "static"), 3, 0, 3)
    assert list(chain.anchors) == ["static"]
    assert not list(chain.parameters())


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (1, 0), (0, 3)])
def test_segments_out_of_range_are_refused(first, last):
    with pytest.raises(ValueError, match=r"segments .* of 3, allowed are 0 .. 2"):
        Chain(FULL, 2, first, last)


def test_state_goes_round_and_moves_between_cuts():
    whole = Chain(FULL, 2, 0, 2)
    randomise(whole)
    for step in range(3):
        for index in (1, 2):
            boundary = chain_boundary(whole, index)
            pass_in_place(boundary, noise(S, B, D, seed=step), token_ids(), noise(S, B, D))
            gradient = sum(boundary.gradient_parts().values())
            boundary.end_step(gradient, 0.01, boundary.statistics())
    saved = whole.state_dict()
    for first, last in ((0, 2), (0, 0), (1, 2), (1, 1)):
        part = Chain(FULL, 2, first, last)
        own = set(part.state_dict())
        part.load_state_dict({key: value for key, value in saved.items() if key in own})
        for index in (1, 2):
            found = part.boundary(index)
            if found is None:
                continue
            assert found.projector.steps == 3
            assert found.there.codebook.step == 3
            for name, value in chain_boundary(whole, index).shared_state().items():
                assert torch.equal(value, found.shared_state()[name])


def test_casting_the_model_keeps_masters_and_codebooks():
    chain = Chain(FULL, 1, 0, 1)
    chain.bfloat16()
    boundary = chain_boundary(chain)
    state = boundary.shared_state()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert chain.anchor(0).table.dtype == torch.bfloat16
    assert chain.anchor(0).basis.dtype == torch.float32
    assert boundary.projector.rounded(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mapel", D, R), "boundary is 'mapel', allowed are .*; did you mean 'mapl'"),
        (("mapl", D, D + 1), r"rank is 65, allowed is 1 .. 64 \(hidden size\)"),
        (("taco", D, R), "boundary 'taco' has no rank, found 32"),
        (("tah_quant", D, 0, V, "full"), "'tah_quant' has no anchors, found 'full'"),
        (("subspace", D, R, V, "full"), "anchors is 'full', allowed is static"),
        (("residual_bottleneck", D, R, V, "full"), "anchors is 'full', allowed is none"),
    ],
)
def test_settings_that_contradict_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BoundarySettings(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (BoundarySettings("mapl", D, R, V, "fulll"), "anchors is 'fulll', allowed are none"),
        (BoundarySettings("mapl", D, R, 0, "full"), "need the vocabulary, found 0 tokens"),
        (
            BoundarySettings("mapl", D, R, forward=QuantizerSettings("rqv")),
            "quantizer is 'rqv', allowed are .*; did you mean 'rvq'",
        ),
        (
            BoundarySettings("mapl", D, R, forward=QuantizerSettings("rvq", {"round": 1})),
            "quantizer rvq: there is no 'round', .*; did you mean 'rounds'",
        ),
        (
            BoundarySettings("mapl", D, R, forward=QuantizerSettings("int8", {"block": 5})),
            "block is 5",
        ),
        (
            BoundarySettings("mapl", D, R, backward=QuantizerSettings("rvq")),
            "boundary 1: gradients cannot be quantised by rvq",
        ),
        (BoundarySettings("tah_quant", 96), "the hidden size is 96, allowed are multiples of 64"),
    ],
)
def test_values_that_are_not_allowed_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Chain(settings, 1, 0, 1)


def test_elementwise_kinds_have_their_own_quantisers():
    with pytest.raises(ValueError, match=r"'taco' has its own quantizer.forward, found 'int8'"):
        BoundarySettings("taco", D, forward=QuantizerSettings("int8"))


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [("taco", 0.026, 0.026), ("int8_hadamard", 0.0061, 0.0063), ("tah_quant", 0.1205, 0.0243)],
)
def test_elementwise_errors(kind, forward, backward):
    boundary = chain_boundary(Chain(BoundarySettings(kind, 256), 1, 0, 1))
    x, g = noise(64, 4, 256), noise(64, 4, 256, seed=1)
    got = pass_in_place(boundary, x, token_ids(), g)
    assert relative_error(got.y, x) == pytest.approx(forward, rel=0.05)
    assert relative_error(got.dx, g) == pytest.approx(backward, rel=0.05)


def test_the_residual_bottleneck_starts_as_truncation_and_learns():
    chain = Chain(BoundarySettings("residual_bottleneck", D, R), 1, 0, 1)
    boundary = chain_boundary(chain)
    x = noise(S, B, D)
    expected = x.clone()
    expected[..., R:] = 0
    assert torch.equal(boundary(x), expected)
    x = x @ noise(D, D, seed=1) / 8
    x[..., R:] = 0.9 * x[..., :R].tanh()  # what truncation drops can be told from the rest
    optimizer = torch.optim.Adam(chain.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss = (boundary(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_constrained_model_loses_nothing_in_its_subspace():
    chain = Chain(BoundarySettings("subspace", D, R, V, "static"), 2, 0, 2)
    boundary = chain_boundary(chain)
    other = chain_boundary(chain, 2)
    assert isinstance(boundary, Subspace)
    assert torch.equal(boundary.projector.a, other.projector.a)
    weight, bias, embedding = noise(D, 20), noise(D, seed=1), noise(V, D, seed=2)
    boundary.constrain_output_(weight)
    boundary.constrain_output_(bias)
    boundary.constrain_embedding_(embedding)
    again = weight.clone()
    boundary.constrain_output_(again)
    assert torch.allclose(again, weight, atol=1e-5)
    ids = token_ids()
    table = chain.anchor(0)
    stream = embedding[ids].transpose(0, 1) + noise(S, B, 20, seed=3) @ weight.t() + bias
    x = stream + table(ids, torch.float32)
    g = noise(S, B, D, seed=4)
    got = pass_in_place(boundary, x, ids, g)
    assert relative_error(got.y, x) < 1e-6
    # the gradient of everything that can still move arrives whole
    assert relative_error(weight.t() @ got.dx[0, 0], weight.t() @ g[0, 0]) < 1e-5
    unconstrained = x + noise(S, B, D, seed=5)
    assert relative_error(boundary(unconstrained, ids), unconstrained) > 0.1


def test_a_fixed_row_does_not_depend_on_the_padded_vocabulary():
    small, large = StaticAnchor(V, D, 3), StaticAnchor(V + 5, D, 3)
    assert torch.equal(small.table, large.table[:V])
    assert not torch.equal(small.table, StaticAnchor(V, D, 4).table)


def test_adams_second_moment_is_level_along_the_hidden_dimension():
    boundary = chain_boundary(Chain(BoundarySettings("subspace", D, R, V, "static"), 1, 0, 1))
    moment, gradient = noise(D, 5).square(), noise(D, 5, seed=1)
    boundary.constrain_output_(gradient)
    boundary.level_second_moment_(moment, 0)
    update = gradient / moment.sqrt()
    projected = update.clone()
    boundary.constrain_output_(projected)
    assert torch.allclose(update, projected, atol=1e-5)
    with pytest.raises(ValueError, match=r"a second moment is \[64, 5\], expected 64 in"):
        boundary.level_second_moment_(moment, 1)


def test_the_subspace_moves_towards_the_gradients():
    settings = BoundarySettings("subspace", D, R, V, "static", move_every=2, move_length=0.05)
    boundary = chain_boundary(Chain(settings, 1, 0, 1))
    assert isinstance(boundary, Subspace)
    g = noise(S, B, 3) @ noise(3, D, seed=1)
    rows = g.view(-1, D)
    shares: list[float] = []
    for _ in range(20):
        u = boundary.projector.a.clone()
        shares.append(float((g @ u).norm() / g.norm()))
        pass_in_place(boundary, noise(S, B, D), token_ids(), g)
        assert boundary.pull is None
        assert boundary.end_step() is None
        pass_in_place(boundary, noise(S, B, D), token_ids(), g)
        assert boundary.end_step(skipped=True) is None
        assert boundary.pull is None
        pass_in_place(boundary, noise(S, B, D), token_ids(), g)
        pull = boundary.pull
        assert pull is not None
        assert relative_error(pull, rows.t() @ (rows @ u)) < 1e-5
        with pytest.raises(ValueError, match="boundary 1: the subspace has no pull"):
            boundary.end_step()
        report = boundary.end_step(pull)
        assert report is not None
        assert report.orthonormality < 1e-6
        assert 0.0 <= report.moved < 0.05 / R**0.5 * 1.001
    assert shares == sorted(shares)
    assert shares[0] < 0.8
    assert shares[-1] > 0.9
    with pytest.raises(ValueError, match=r"pull is \[1, 1\] and length 0.1"):
        boundary.move(torch.zeros(1, 1), 0.1)
    with pytest.raises(ValueError, match=r"every is -1 and length 0\.0"):
        chain_boundary(Chain(replace(settings, move_every=-1, move_length=0.0), 1, 0, 1))


def test_a_boundary_can_be_built_alone():
    boundary = build(BoundarySettings("mapl", D, R), 3, "sender")
    assert boundary.place.index == 3
    with pytest.raises(ValueError, match="index is 0, allowed is 1 or more"):
        build(BoundarySettings("mapl", D, R), 0)
    with pytest.raises(ValueError, match="ends is 'left', allowed are both, sender, receiver"):
        build(BoundarySettings("mapl", D, R), 1, "left")
    with pytest.raises(ValueError, match="boundary 1: a subspace network needs its static anch"):
        build(BoundarySettings("subspace", D, R, V, "static"), 1)
