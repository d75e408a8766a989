"""The byte counts of the collectives, against numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.collectives.traffic import Traffic, slice_elements, traffic

BLOCK = 256


def _payload(numel: int) -> int:
    """One byte an element, in whole blocks, and eight more a block: E4M3 with dual scales."""
    return -(-numel // BLOCK) * (BLOCK + 8)


def test_by_hand() -> None:
    """1 Mi BF16 elements on 4 ranks: 4096 blocks."""
    numel, whole = 1 << 20, 4096 * 264

    def of(op: str, algorithm: str) -> Traffic:
        return traffic(op, algorithm, numel, 2, 4, _payload, block=BLOCK)

    assert of("all_reduce", "one_shot") == Traffic(raw=3 << 20, wire=3 * whole)
    assert of("all_reduce", "peer_read") == of("all_reduce", "one_shot")
    assert of("all_reduce", "two_shot") == Traffic(raw=3 << 20, wire=6 * whole // 4)
    for op in ("reduce_scatter", "all_gather"):
        expected = Traffic(raw=3 * (numel // 4) * 2, wire=3 * whole // 4)
        assert of(op, "one_shot") == of(op, "two_shot") == expected


def test_both_algorithms_are_equal_on_two_ranks() -> None:
    """At P = 2, with an even number of blocks."""
    sent = [
        traffic("all_reduce", a, 8 * BLOCK, 2, 2, _payload, block=BLOCK)
        for a in ("one_shot", "two_shot")
    ]
    assert sent[0] == sent[1] == Traffic(raw=8 * BLOCK * 2, wire=8 * 264)


@given(
    st.integers(0, 100_000),
    st.integers(1, 16),
    st.sampled_from([32, 64, 256, 1024]),
)
def test_slices_hold_the_tensor(numel: int, world_size: int, block: int) -> None:
    """P slices of whole blocks hold everything, and a block less in each would not."""
    width = slice_elements(numel, world_size, block)
    assert width % block == 0
    assert world_size * width >= numel
    assert width == 0 or world_size * (width - block) < numel


@given(st.integers(0, 100_000), st.sampled_from([1, 2, 4]))
def test_one_rank_and_no_elements_send_nothing(numel: int, itemsize: int) -> None:
    """There is nobody to send to, or nothing to send."""
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for algorithm in ("one_shot", "two_shot"):
            alone = traffic(op, algorithm, numel, itemsize, 1, _payload, block=BLOCK)
            empty = traffic(op, algorithm, 0, itemsize, 4, _payload, block=BLOCK)
            assert alone == empty == Traffic(raw=0, wire=0)


def test_refusals() -> None:
    """Unknown names and slices that do not exist are errors that say what was found."""
    with pytest.raises(ValueError, match="'broadcast', allowed: all_reduce"):
        traffic("broadcast", "one_shot", 8, 2, 2, _payload, block=BLOCK)
    with pytest.raises(ValueError, match="'auto', allowed: one_shot, two_shot"):
        traffic("all_reduce", "auto", 8, 2, 2, _payload, block=BLOCK)
    with pytest.raises(ValueError, match="reduce_scatter of 9 elements: not 2 equal slices"):
        traffic("reduce_scatter", "one_shot", 9, 2, 2, _payload, block=BLOCK)
