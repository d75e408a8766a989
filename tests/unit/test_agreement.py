"""Ranks compare their configurations through a store, without a process group."""

import datetime
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from megatron_taco.config import ConfigError
from megatron_taco.training.agreement import agree
from megatron_taco.training.launch_env import Ranks

SHORT = datetime.timedelta(seconds=1)


def outcomes(configurations: list[dict[str, Any]], present: int | None = None) -> list[str]:
    """What each rank says: '' or its error. Only the first ``present`` ranks take part."""
    store = dist.HashStore()
    world = len(configurations)

    def one(rank: int) -> str:
        ranks = Ranks(rank=rank, local_rank=rank, world_size=world)
        try:
            agree(store, ranks, configurations[rank], "configuration", SHORT)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world if present is None else present)))


def test_equal_configurations_agree() -> None:
    assert outcomes([{"a.b": 1, "c": "x"}] * 4) == [""] * 4


def test_every_rank_hears_of_every_difference() -> None:
    said = outcomes([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2, "c": True}])
    for text in said:
        assert "must have the same configuration" in text
        assert "rank 1 differs from rank 0: b: 2 != 3" in text
        assert "rank 2 differs from rank 0: c: (not set) != true" in text
        assert "a:" not in text.replace("differs from rank 0: ", "")


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (1, True), ("1", 1)])
def test_values_of_another_type_differ(left: Any, right: Any) -> None:
    assert all("differs" in text for text in outcomes([{"k": left}, {"k": right}]))


def test_a_rank_that_does_not_answer_is_named() -> None:
    for text in outcomes([{"a": 1}] * 3, present=2):
        assert "ranks 2 did not report their configuration within 1 s" in text
