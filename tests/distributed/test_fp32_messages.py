"""The FP32 arm of ``bench step``: sums that BF16 would round on the way, and handles."""

import pytest
import torch
import torch.distributed as dist

from megatron_taco.lab.step_wide import send_wide
from tests.ranks import RankRunner

VALUES = (256.0, 1.0, 1.0)
"""256 + 1 is 256 in BF16, and 256 + 1 + 1 is 258."""


def _check(rank: int, size: int, async_op: bool) -> None:
    group = dist.group.WORLD
    assert group is not None

    def call(collective: str, output: torch.Tensor, input: torch.Tensor) -> None:
        handle = send_wide(collective, output, input, group, async_op)
        if async_op:
            assert handle.wait()
            assert handle.wait()
        else:
            assert handle is None

    whole = torch.full((2, 6), VALUES[rank], dtype=torch.bfloat16)
    call("all_reduce", whole, whole)
    assert torch.equal(whole, torch.full_like(whole, 258))

    source = torch.full((6, 2), VALUES[rank], dtype=torch.bfloat16)
    scattered = torch.zeros(2, 2, dtype=torch.bfloat16)
    call("reduce_scatter", scattered, source)
    assert torch.equal(scattered, torch.full_like(scattered, 258))

    gathered = torch.zeros(6, 2, dtype=torch.bfloat16)
    call("all_gather", gathered, torch.full((2, 2), VALUES[rank], dtype=torch.bfloat16))
    assert gathered[:, 0].tolist() == [256, 256, 1, 1, 1, 1]


@pytest.mark.parametrize("async_op", [False, True])
def test_sums_are_rounded_once(run_ranks: RankRunner, async_op: bool) -> None:
    run_ranks(_check, 3, async_op)
