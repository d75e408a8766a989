"""The compressor of docs/adding-a-compressor.md, run from that page."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_taco.collectives import all_gather, all_reduce, reduce_scatter
from megatron_taco.compressors import Compressor
from tests.ranks import RankRunner

PAGE = Path(__file__).parent.parent.parent / "docs" / "adding-a-compressor.md"


def example() -> Compressor:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, type[Compressor]] = {"__name__": "example"}  # type: ignore[dict-item]
    exec(compile(code, str(PAGE), "exec"), names)
    return names["AbsMax8"]()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 1000])
def test_it_keeps_the_contract(numel: int, dtype: torch.dtype) -> None:
    compressor = example()
    x = torch.randn(3, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    payloads = compressor.encode_rows(x)
    assert payloads.shape == (3, compressor.payload_bytes(numel))
    back = compressor.decode_rows(payloads, numel, torch.float32)
    assert back.shape == (3, numel)
    if numel > 100:
        assert 0.002 < relative(back, x.float()) < 0.01
    assert torch.equal(compressor.decode_sum(payloads, numel), (back[0] + back[1]) + back[2])
    if numel == 1000:
        x[1, 200] = torch.inf
        back = compressor.decode_rows(compressor.encode_rows(x), numel, torch.float32)
        assert back[1, 128:256].isnan().all()
        assert int(back.isnan().sum()) == 128
        assert int(compressor.nonfinite_blocks(compressor.encode_rows(x), numel)) == 1
        zeros = compressor.decode_rows(compressor.encode_rows(x * 0.0), numel, dtype)
        assert torch.equal(zeros[0], torch.zeros(numel, dtype=dtype))


def through_collectives(rank: int, size: int) -> list[torch.Tensor]:
    compressor, group = example(), dist.group.WORLD
    assert group is not None
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    results = []
    for algorithm in ("one_shot", "two_shot"):
        summed = xs[rank].clone()
        all_reduce(summed, group=group, compressor=compressor, algorithm=algorithm)
        assert relative(summed, xs[0] + xs[1]) < 0.02
        results.append(summed)
    part = torch.empty(500)
    reduce_scatter(part, xs[rank].clone(), group=group, compressor=compressor)
    assert relative(part, (xs[0] + xs[1])[rank * 500 :][:500]) < 0.02
    whole = torch.empty(2000)
    all_gather(whole, xs[rank], group=group, compressor=compressor)
    assert relative(whole, torch.cat(xs)) < 0.01
    return [*results, whole]


def test_it_works_in_the_collectives(run_ranks: RankRunner) -> None:
    """Every rank ends with the same values, bit for bit."""
    left, right = run_ranks(through_collectives, 2)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
