"""The cuts of a message: whole units, all elements once, bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.collectives.chunks import MEMORY_LIMIT, plan


@given(
    st.integers(1, 10**9),
    st.sampled_from([32, 256, 2048]),
    st.one_of(st.none(), st.integers(1, 40)),
    st.floats(0.1, 40),
    st.sampled_from(["cpu", "cuda"]),
)
def test_cuts(numel: int, unit: int, chunks: int | None, factor: float, device: str) -> None:
    nbytes = 2 * numel
    wire = int(factor * nbytes)
    cuts = plan(numel, nbytes, unit=unit, wire_bytes=wire, chunks=chunks, device_type=device)
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
    """One on CPUs; on GPUs more for larger messages."""

    def count(nbytes: int, device: str) -> int:
        cuts = plan(
            nbytes // 2, nbytes, unit=256, wire_bytes=nbytes, chunks=None, device_type=device
        )
        return len(cuts.spans)

    assert [count(mib << 20, "cpu") for mib in (1, 16, 64, 256)] == [1, 1, 1, 1]
    assert [count(mib << 20, "cuda") for mib in (1, 15, 16, 64, 256)] == [1, 1, 2, 4, 4]
