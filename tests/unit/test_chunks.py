"""The cuts of a message: whole units, all elements once, bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.collectives.chunks import MEMORY_LIMIT, plan


@given(
    st.integers(1, 10**9),
    st.sampled_from([32, 256, 2048]),
    st.one_of(st.none(), st.integers(1, 40)),
    st.floats(0.1, 40),
)
def test_cuts(numel: int, unit: int, chunks: int | None, factor: float) -> None:
    nbytes = 2 * numel
    wire = int(factor * nbytes)
    cuts = plan(numel, nbytes, unit=unit, wire_bytes=wire, chunks=chunks)
    assert cuts.spans[0][0] == 0
    assert cuts.spans[-1][1] == numel
    for (first, last), (following, _) in zip(cuts.spans, cuts.spans[1:], strict=False):
        assert first < last == following
        assert last % unit == 0
    count = len(cuts.spans)
    assert 1 <= cuts.depth <= count
    units = -(-numel // unit)
    if chunks is not None:
        assert count == min(chunks, units)
    elif nbytes >= 1 << 20 and count < units:
        # Chunks differ by one unit at most; depth of them stay below the limit.
        assert cuts.depth * wire / count <= MEMORY_LIMIT * nbytes
        assert count == 1 or cuts.depth > 1


def test_default_number() -> None:
    """One, but where the buffers of all peers would be too large."""

    def count(nbytes: int, factor: int) -> tuple[int, int]:
        wire = factor * nbytes
        cuts = plan(nbytes // 2, nbytes, unit=256, wire_bytes=wire, chunks=None)
        return len(cuts.spans), cuts.depth

    assert [count(mib << 20, 2) for mib in (1, 16, 256)] == [(1, 1)] * 3
    assert [count(64 << 20, factor) for factor in (3, 4, 8)] == [(4, 3), (4, 2), (8, 2)]
    assert count(1 << 19, 8) == (1, 1)  # a small message is not worth several
