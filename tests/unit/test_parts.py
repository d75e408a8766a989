"""Where a message is cut."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.collectives.parts import part_ranges


@given(
    rows=st.integers(1, 3000),
    row_elements=st.integers(1, 5000),
    block=st.sampled_from([32, 64, 128, 256, 512]),
    parts=st.integers(1, 16),
)
def test_parts_hold_all_rows_in_whole_units(
    rows: int, row_elements: int, block: int, parts: int
) -> None:
    ranges = part_ranges(rows, row_elements, block, parts)
    assert [row for first, last in ranges for row in range(first, last)] == list(range(rows))
    assert 1 <= len(ranges) <= parts
    assert all(first < last for first, last in ranges)
    assert all(last * row_elements % block == 0 for _, last in ranges[:-1])


@given(tokens=st.integers(16, 5000), parts=st.integers(1, 16))
def test_parts_are_alike_where_rows_are_blocks(tokens: int, parts: int) -> None:
    sizes = [last - first for first, last in part_ranges(tokens, 2048, 256, parts)]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
