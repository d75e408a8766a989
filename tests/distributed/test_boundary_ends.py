"""What both ends of a boundary do together: gradients, sums in order, the proof of agreement."""

from typing import Any

import pytest
import torch

from megatron_taco.boundaries import Boundary, BoundarySettings, Chain, build
from megatron_taco.boundaries.stiefel import haar
from megatron_taco.collectives.ordered import ordered_all_reduce_
from megatron_taco.patching.boundary_agreement import DisagreementError, check_agreement
from megatron_taco.patching.boundary_gradients import (
    EXCHANGE,
    PROJECTOR_SUM,
    Groups,
    whole_gradients,
)
from megatron_taco.patching.boundary_start import share_drawn
from megatron_taco.telemetry.counters import Counters
from tests.ranks import RankRunner

HIDDEN, RANK = 24, 4


def cut(number: int, ends: str) -> Boundary:
    return build(BoundarySettings(kind="mapl", hidden=HIDDEN, rank=RANK), number, ends)


def noise(*key: int) -> torch.Tensor:
    """The same values in every process, FP32 [d, r]."""
    seed = sum(part * 1000**place for place, part in enumerate(key))
    return torch.randn(HIDDEN, RANK, generator=torch.Generator().manual_seed(seed))


def groups_by_hand(rank: int) -> Groups:
    import torch.distributed as dist

    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage, replica = divmod(rank, 2)
    return Groups((replicas[stage],), 0.5, pipelines[replica])


def groups_of_context_parallelism() -> Groups:
    """Megatron's own: what sees other tokens of a sequence counts as a replica."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    from megatron_taco.patching.pipeline import PipelineHooks

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, context_parallel_size=2
    )
    assert parallel_state.get_data_parallel_world_size() == 1
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=2, context_parallel_size=2,
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
    )  # fmt: skip
    return PipelineHooks.groups(config, None)


def four_ranks(
    rank: int, world_size: int, tokens: int | None, context_parallel: bool
) -> dict[str, Any]:
    """Two replicas (even and odd ranks) of two stages with the boundaries 1 and 2 between them."""
    groups = groups_of_context_parallelism() if context_parallel else groups_by_hand(rank)
    stage, replica = divmod(rank, 2)
    # Interleaved chunks: boundary 1 goes from stage 0 to 1, boundary 2 back again.
    ends = ("sender", "receiver") if stage == 0 else ("receiver", "sender")
    boundaries = {number: cut(number, end) for number, end in zip((1, 2), ends, strict=True)}
    for number, boundary in boundaries.items():
        for part in boundary.gradient_parts().values():
            part.copy_(noise(number, stage, replica))
    counters = Counters([EXCHANGE, PROJECTOR_SUM])
    count = None if tokens is None else torch.tensor([tokens])
    whole = whole_gradients(boundaries, groups, count, counters)
    return {
        "whole": whole,
        "sent": counters[EXCHANGE].wire,
        "messages": counters[EXCHANGE].seen,
        "summed": counters[PROJECTOR_SUM].wire,
    }


@pytest.mark.parametrize(("tokens", "context_parallel"), [(None, False), (7, False), (None, True)])
def test_both_ends_have_the_same_whole_gradient(
    run_ranks: RankRunner, tokens: int | None, context_parallel: bool
) -> None:
    found = run_ranks(four_ranks, 4, tokens, context_parallel, preload="megatron")
    for number in (1, 2):
        parts = [
            sum(noise(number, stage, replica).double() for replica in (0, 1)) / 2
            for stage in (0, 1)
        ]
        expected = (parts[0] + parts[1]) / (tokens or 1)
        for rank in found:
            torch.testing.assert_close(rank["whole"][number].double(), expected, rtol=0, atol=1e-6)
            assert torch.equal(rank["whole"][number], found[0]["whole"][number])
    assert {rank["messages"] for rank in found} == {1}
    assert {rank["sent"] for rank in found} == {2 * HIDDEN * RANK * 4}
    # A ring of two sends as many bytes as there are, of each boundary.
    assert {rank["summed"] for rank in found} == {2 * HIDDEN * RANK * 4}


def sums(rank: int, world_size: int) -> list[torch.Tensor]:
    import torch.distributed as dist

    found = []
    for size in (0, 1, 3, 1000):
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(size, generator=generator) * 10.0**rank
        ordered_all_reduce_(tensor, dist.group.WORLD)
        found.append(tensor)
    return found


def test_sums_are_taken_in_the_order_of_the_ranks(run_ranks: RankRunner) -> None:
    found = run_ranks(sums, 3)
    for index, size in enumerate((0, 1, 3, 1000)):
        terms = [
            torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
            for rank in range(3)
        ]
        expected = (terms[0] + terms[1]) + terms[2]
        assert all(torch.equal(rank[index], expected) for rank in found)


def disagree(rank: int, world_size: int, spoil: bool) -> str:
    """Boundary 1 between ranks 0 and 1, boundary 2 between ranks 1 and 2."""
    held = {
        0: {1: cut(1, "sender")},
        1: {1: cut(1, "receiver"), 2: cut(2, "sender")},
        2: {2: cut(2, "receiver")},
    }[rank]
    if spoil and rank == 2:
        projector = held[2].projector
        assert projector is not None
        projector.a[3, 1] += 1e-7
    try:
        check_agreement(held, 2, torch.device("cpu"))
    except DisagreementError as error:
        return str(error)
    return ""


def test_one_bit_at_one_end_fails_every_rank_by_name(run_ranks: RankRunner) -> None:
    assert run_ranks(disagree, 3, False) == [""] * 3
    found = run_ranks(disagree, 3, True)
    assert found[0].startswith("boundary 2: the projector differs between ranks [1] | [2]; all")
    assert found == [found[0]] * 3


KINDS = (("mapl", "factorised"), ("subspace", "static"))


def begin(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Two replicas (even and odd ranks) of two stages, on hosts that all draw something else."""
    stage, replica = divmod(rank, 2)
    found = []
    for kind, anchors in KINDS:
        settings = BoundarySettings(
            kind=kind, hidden=HIDDEN, rank=RANK, vocab=8, anchors=anchors, seed=rank
        )
        # Boundary 1 in place in the first stage, boundary 2 between the two.
        chain = Chain(settings, 2, 2 * stage, 1 + stage)
        share_drawn([chain], replica, torch.device("cpu"))
        found.append({name: value for name, value in chain.state_dict().items() if "_" not in name})
    return found


def test_hosts_that_draw_something_else_begin_with_the_same_bits(run_ranks: RankRunner) -> None:
    """Each has what the first replica's stages drew: stage 0 all projectors, each its own bases."""
    ranks = run_ranks(begin, 4)
    for rank, (mapl, subspace) in enumerate(ranks):
        stage = rank // 2
        for name, tensor in mapl.items():
            number = name.split(".")[1]
            if name.endswith("projector.a"):
                assert torch.equal(tensor, haar(HIDDEN, RANK, 0, int(number)))
            elif name.endswith("basis"):
                drawn = haar(HIDDEN, RANK, 2 * stage, int(number), purpose="anchor basis")
                assert torch.equal(tensor, drawn.t())
        assert len(mapl) == (8, 4)[stage]
        projectors = [each for name, each in subspace.items() if name.endswith("projector.a")]
        assert len(projectors) == (2, 1)[stage]
        assert all(torch.equal(each, haar(HIDDEN, RANK, 0, 0)) for each in projectors)
