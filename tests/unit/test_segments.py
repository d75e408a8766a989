"""Runs and slices of a bucket: all is covered once, kinds apart, messages as long as said."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_taco.collectives.segments import Run, runs_of, slice_of
from megatron_taco.compressors import BlockInteger
from megatron_taco.patching.data_plans import Plan, Stream
from megatron_taco.patching.parameter_kinds import kind_of

CODE = BlockInteger(4, 32, 1, "bf16")


def test_neighbours_of_one_kind_make_one_run_and_padding_follows_what_precedes_it():
    places = [(64, 70, "b"), (0, 10, "a"), (12, 20, "a"), (128, 129, "b"), (130, 140, "a")]
    assert runs_of(places, 200) == (Run(0, 64, "a"), Run(64, 130, "b"), Run(130, 200, "a"))
    assert runs_of([(5, 9, "a")], 9) == (Run(0, 9, "a"),)
    with pytest.raises(ValueError, match="a parameter at 5:20 overlaps one that ends at 10"):
        runs_of([(0, 10, "a"), (5, 20, "a")], 30)
    with pytest.raises(ValueError, match="outside its bucket of 15 elements"):
        runs_of([(0, 20, "a")], 15)


@st.composite
def bucket(draw):
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=8))
    at, places = 0, []
    for length in lengths:
        at += draw(st.integers(0, 3))
        places.append((at, at + length, draw(st.sampled_from(["mlp", "norm", "attention"]))))
        at += length
    return places, at + draw(st.integers(0, 5))


@settings(max_examples=60, deadline=None)
@given(bucket(), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_slices_hold_every_element_once(drawn, count, dtype):
    places, numel = drawn
    runs = runs_of(places, numel)
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert runs[0].start == 0
    assert runs[-1].stop == numel
    source, target = torch.arange(numel).to(dtype), torch.full((numel,), -1.0, dtype=dtype)
    width = -(-numel // count)
    for index in range(count):
        piece = slice_of(
            runs,
            min(index * width, numel),
            min((index + 1) * width, numel),
            exact=lambda kind: kind == "norm",
            itemsize=dtype.itemsize,
            payload_bytes=CODE.payload_bytes,
        )
        at = 0
        for part in piece.parts:
            assert (part.offset, part.offset % 16) == (at, 0)
            assert part.exact is (part.kind == "norm")
            wanted = part.numel * dtype.itemsize if part.exact else CODE.payload_bytes(part.numel)
            assert part.used == wanted
            at += part.size
            part.put(part.take(source), target)
        assert piece.size == at
    assert torch.equal(source, target)


def plan(numel: int, min_bytes: int = 0) -> Plan:
    stream = Stream(
        role="dp.gradients",
        compressor=BlockInteger(),
        exclude=frozenset({"embedding"}),
        min_bytes=min_bytes,
        start_step=0,
    )
    third = numel // 3
    places = [(0, third, "mlp"), (third, third + 100, "norm"), (third + 100, numel, "embedding")]
    return Plan(name="x", runs=runs_of(places, numel), numel=numel, stream=stream, itemsize=4)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_are_those_of_the_messages(collective, size):
    made = plan(12_000)
    for rank in range(size):
        found = made.traffic(collective, rank, size, True)
        if collective == "all_reduce" and size == 2:
            total = made.slices(1, equal=False)[0].size
        else:
            pieces = made.slices(size, equal=collective != "all_reduce")
            sizes = [piece.size for piece in pieces]
            scattered = sum(sizes) - sizes[rank]
            gathered = (size - 1) * max(sizes)
            total = {
                "reduce_scatter": scattered,
                "all_gather": gathered,
                "all_reduce": scattered + gathered,
            }[collective]
        assert sum(traffic.wire for traffic in found.values()) == total
        plain = made.traffic(collective, rank, size, False)
        rings = 2 if collective == "all_reduce" else 1
        raw = sum(traffic.raw for traffic in plain.values())
        assert raw == pytest.approx(rings * (size - 1) * 12_000 * 4 / size, abs=3)
        assert all(traffic.raw == traffic.wire for traffic in plain.values())


def test_a_bucket_is_compressed_if_it_is_large_enough_and_not_all_exact():
    assert plan(12_000, min_bytes=48_000).compresses
    assert not plan(12_000, min_bytes=48_001).compresses
    stream = plan(12_000).stream
    exact = Plan(name="n", runs=(Run(0, 9, "norm"),), numel=9, stream=stream, itemsize=4)
    assert not exact.compresses


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("module.embedding.word_embeddings.weight", (8, 8), "embedding"),
        ("module.embedding.position_embeddings.weight", (8, 8), "embedding"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (8, 8), "attention"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", (8,), "norm"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (8,), "norm"),
        ("decoder.layers.11.mlp.linear_fc2.weight", (8, 8), "mlp"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight0", (8, 8), "mlp"),
        ("decoder.final_layernorm.weight", (8,), "norm"),
        ("output_layer.weight", (8, 8), "output_layer"),
        ("adapter.weight", (8, 8), "other"),
        ("decoder.scale", (), "norm"),
    ],
)
def test_kinds_follow_names_and_shapes(name, shape, kind):
    assert kind_of(name, torch.empty(shape)) == kind


def test_copies_on_several_ranks_are_kinds_of_their_own():
    """A copy that is rounded with other neighbours than the other copies would drift from them."""
    weight = torch.empty(8, 8)
    position = "embedding.position_embeddings.weight"
    assert kind_of(position, weight, tensor_parallel_size=1) == "embedding"
    assert kind_of(position, weight, tensor_parallel_size=2) == "replicated"
    weight.tensor_model_parallel = True
    assert kind_of("embedding.word_embeddings.weight", weight, 2) == "embedding"
    weight.shared_embedding = True
    assert kind_of("embedding.word_embeddings.weight", weight, 2) == "tied_embedding"

    def stream(role, *exclude):
        return Stream(
            role=role,
            compressor=BlockInteger(),
            exclude=frozenset(exclude),
            min_bytes=0,
            start_step=0,
        )

    assert not stream("dp.gradients").is_exact("tied_embedding")
    assert stream("dp.gradients", "embedding").is_exact("tied_embedding")
    assert stream("dp.weights").is_exact("tied_embedding")
    for role in ("dp.gradients", "dp.weights"):
        assert stream(role).is_exact("replicated")
        assert stream(role).is_exact("norm")
