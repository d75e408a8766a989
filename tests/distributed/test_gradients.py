"""Gradient methods on 2, 3 and 4 ranks: equal replicas, conservation, convergence, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_taco.compressors import BlockInteger, Taco
from megatron_taco.gradients import METHODS, GradientMethod
from megatron_taco.gradients.cd_adam import CDAdam
from megatron_taco.gradients.homomorphic import Homomorphic
from megatron_taco.gradients.pactrain import PacTrain
from megatron_taco.gradients.powersgd import PowerSGD
from megatron_taco.gradients.sparseloco import SparseLoCo
from megatron_taco.gradients.tagc import TAGC
from megatron_taco.gradients.topk import TopK
from tests.distributed import oracle
from tests.ranks import RankRunner

SHAPES = {
    "decoder.layers.0.linear.weight": (24, 40),
    "decoder.layers.0.norm.weight": (1,),
    "decoder.layers.1.linear.weight": (33, 17),
    "decoder.layers.1.bias": (7,),
    "output.weight": (16, 48),
}
INT8 = BlockInteger(8, 32, 1, "fp32")
MAKERS: dict[str, Callable[[Any], GradientMethod]] = {
    "powersgd": lambda group: PowerSGD(group, rank=3),
    "topk": lambda group: TopK(group, ratio=0.1),
    "topk sort": lambda group: TopK(group, ratio=0.1, selection="sort"),
    "sparseloco": lambda group: SparseLoCo(group, local_steps=2, ratio=0.1, chunk=256),
    "sparseloco int8": lambda group: SparseLoCo(
        group, local_steps=1, ratio=0.2, chunk=256, compressor=INT8
    ),
    "tagc": lambda group: TAGC(group, ratio=0.1),
    "pactrain": lambda group: PacTrain(group),
    "pactrain ternary": lambda group: PacTrain(group, ternary=True),
    "homomorphic": lambda group: Homomorphic(group),
    "cd_adam": lambda group: CDAdam(group, compressor=BlockInteger(4, 32, 32, "bf16")),
}

Named = dict[str, torch.Tensor]


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Named:
    """Gradients of a rank; every process can make those of any rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def mean_of(world: int, step: int) -> Named:
    every = [gradients(rank, step) for rank in range(world)]
    return {name: sum(g[name] for g in every) / world for name in SHAPES}  # type: ignore[misc]


def flat(tensors: Named) -> torch.Tensor:
    return torch.cat([t.detach().float().reshape(-1) for t in tensors.values()])


def make(name: str) -> GradientMethod:
    method = MAKERS[name](dist.group.WORLD)
    if isinstance(method, SparseLoCo):
        method.begin(gradients(0, 99))
    return method


def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_equal_and_resumable(rank: int, world: int) -> list[str]:
    """All methods, BF16 and FP32: digests of what all ranks must share; resuming is bit-equal."""
    shared = []
    for name in MAKERS:
        for dtype in (torch.float32, torch.bfloat16):
            method, resumed = make(name), None
            for step in range(4):
                given = gradients(rank, step, dtype)
                again = {n: t.clone() for n, t in given.items()}
                sent = method.reduce(given, step)
                assert sent.raw > 0
                assert all(t.isfinite().all() for t in given.values()), name
                if resumed is not None:
                    assert resumed.reduce(again, step) == sent, name
                    assert all(oracle.same_bits(again[n], given[n]) for n in given), name
                if step == 1:
                    resumed = make(name)
                    resumed.load_state_dict(method.state_dict())
                if method.operates_on == "gradients" or step in (1, 3):
                    shared += [f"{name} {dtype} {step}"] + [
                        oracle.digest(t) for t in given.values()
                    ]
            shared += [oracle.digest(t) for t in method.state_dict()["shared"].values()]
    return shared


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_end_with_the_same_bits_and_resume_exactly(
    run_ranks: RankRunner, world_size: int
) -> None:
    results = run_ranks(check_equal_and_resumable, world_size, timeout=120)
    assert len(results[0]) > 300
    assert all(result == results[0] for result in results)


def check_conservation(rank: int, world: int) -> None:
    """Nothing is lost: what was given is what came out plus what is kept."""
    for name in ("powersgd", "topk", "topk sort", "tagc"):
        method = make(name)
        given_so_far, out_so_far = torch.zeros(()), torch.zeros(())
        for step in range(3):
            given = gradients(rank, step)
            given_so_far = given_so_far + flat(given)
            method.reduce(given, step)
            out_so_far = out_so_far + flat(given)
        kept = method.state_dict()["local"]
        left = flat(
            {n: kept[n].view(s) if n in kept else torch.zeros(s) for n, s in SHAPES.items()}
        )
        assert left.norm() > 0.3 * given_so_far.norm(), name
        wanted = mean_over_ranks(given_so_far)
        found = out_so_far + mean_over_ranks(left)
        assert (found - wanted).norm() < 1e-6 * wanted.norm(), name

    # The references of CD-Adam: the owners' slices are the mean of the ranks' references.
    method = make("cd_adam")
    for step in range(3):
        method.reduce(gradients(rank, step), step)
    state = method.state_dict()
    reference = mean_over_ranks(state["local"]["reference"])[rank]
    torch.testing.assert_close(state["local"]["slice_mean"], reference)


def check_exactness(rank: int, world: int) -> None:
    group = dist.group.WORLD
    # PowerSGD: a mean of rank r or less comes out whole.
    generator = torch.Generator().manual_seed(5)
    left = torch.randn(40, 3, generator=generator)
    right = torch.randn(3, 30, generator=torch.Generator().manual_seed(rank))
    given = {"m": left @ right}
    wanted = mean_over_ranks(given["m"])
    PowerSGD(group, rank=3).reduce(given, 0)
    assert (given["m"] - wanted).norm() < 1e-5 * wanted.norm()

    # Top-k: the k largest, and all of them at ratio 1.
    x = gradients(rank, 0)["output.weight"]
    method = TopK(group, ratio=0.05, selection="sort")
    method.reduce({"w": x.clone()}, 0)
    left_over = method.state_dict()["local"]["w"]
    sent = left_over == 0
    assert int(sent.sum()) == -(-x.numel() * 5 // 100)
    assert x[sent].abs().min() >= x[~sent].abs().max()
    given = {"w": x.clone()}
    TopK(group, ratio=1.0).reduce(given, 0)
    torch.testing.assert_close(given["w"], mean_over_ranks(x))

    # SparseLoCo with H = 1 and everything sent averages parameters.
    start, given = gradients(0, 50), gradients(rank, 51)
    method = SparseLoCo(group, local_steps=1, ratio=1.0, chunk=64)
    method.begin(start)
    method.reduce(given, 0)
    torch.testing.assert_close(given, mean_of(world, 51))
    assert method.state_dict()["local"]["residual"].abs().max() == 0

    # Homomorphic sums: exact on the union, by sketch and in a row, for few and for many values.
    for packing in ("sketch", "union"):
        for share in (0.0, 0.002, 0.02, 0.5):
            x = torch.randn(20_000, generator=torch.Generator().manual_seed(rank + 7))
            keep = torch.rand(20_000, generator=torch.Generator().manual_seed(rank + 90)) < share
            x = torch.where(keep, x, 0.0)
            given, method = {"x": x.clone()}, Homomorphic(group, packing=packing)
            sent = method.reduce(given, 0)
            wanted = mean_over_ranks(x)
            assert torch.equal(given["x"] != 0, wanted != 0)
            torch.testing.assert_close(given["x"], wanted, rtol=0, atol=3e-6)
            if share <= 0.02:
                assert sent.wire < 0.25 * sent.raw

    # PacTrain: exact on masked gradients; the bitmap is sent once.
    mask = torch.rand(5000, generator=torch.Generator().manual_seed(3)) < 0.2
    method, wire = PacTrain(group), []
    for step in range(3):
        x = torch.randn(5000, generator=torch.Generator().manual_seed(10 * step + rank)) * mask
        given = {"x": x.clone()}
        wire.append(method.reduce(given, step).wire)
        torch.testing.assert_close(given["x"], mean_over_ranks(x))
    kept, others = int(mask.sum()), world - 1
    assert wire[1] == wire[2] == others + -(-2 * others * kept * 4 // world)
    assert wire[0] == wire[1] + others * 625
    # A value outside the mask is not lost.
    x = torch.zeros(5000)
    x[rank] = 1.0
    given = {"x": x.clone()}
    method.reduce(given, 3)
    torch.testing.assert_close(given["x"], mean_over_ranks(x))


def check_bytes(rank: int, world: int) -> None:
    """What is counted is what the published equations send."""
    others, group = world - 1, dist.group.WORLD
    x = {"w": torch.randn(100, 80), "b": torch.randn(9)}
    raw = -(-2 * others * 8009 * 4 // world)

    def sent_by(method: GradientMethod) -> int:
        found = method.reduce({n: t.clone() for n, t in x.items()}, 0)
        assert found.raw == raw
        return found.wire

    def ring(values: int) -> int:
        return -(-2 * others * values * 4 // world)

    assert sent_by(PowerSGD(group, rank=2)) == ring(100 * 2 + 9) + ring(80 * 2)
    assert sent_by(TopK(group, ratio=0.01, selection="sort")) == others * (8 + 8 * (80 + 1))
    sparse = SparseLoCo(group, local_steps=2, ratio=0.125, chunk=128)
    sparse.begin(x)
    assert sent_by(sparse) == 0
    assert sparse.reduce({n: t.clone() for n, t in x.items()}, 1).wire == others * 63 * 16 * (4 + 2)
    code = Taco("int4", 64, scales="merged_bf16")
    width = -(-8009 // world)
    assert sent_by(CDAdam(group, compressor=code)) == 2 * others * code.payload_bytes(width)
    assert sent_by(TopK(group, start_step=1)) == raw


def check_a_nan_reaches_everyone_and_is_forgotten(rank: int, world: int) -> list[str]:
    shared = []
    for name in MAKERS:
        method = make(name)
        if method.operates_on == "parameters":
            continue  # there the step has been taken already; the model itself is NaN
        for step in range(4):
            given = gradients(rank, step)
            if step == 1 and rank == world - 1:
                given["decoder.layers.1.linear.weight"][3, 4] = float("nan")
                given["output.weight"][0, 0] = float("inf")
            method.reduce(given, step)
            bad = [not t.isfinite().all() for t in given.values()]
            assert any(bad) is (step == 1), f"{name}, step {step}: {bad}"
            if step == 1:
                assert not given["decoder.layers.1.linear.weight"][3, 4].isfinite(), name
                assert not given["output.weight"][0, 0].isfinite(), name
            shared += [oracle.digest(t) for t in given.values()]
    return shared


def all_checks(rank: int, world: int) -> list[str]:
    check_conservation(rank, world)
    check_exactness(rank, world)
    check_bytes(rank, world)
    return check_a_nan_reaches_everyone_and_is_forgotten(rank, world)


@pytest.mark.parametrize("world_size", [2, 4])
def test_conservation_exactness_bytes_and_nan(run_ranks: RankRunner, world_size: int) -> None:
    results = run_ranks(all_checks, world_size, timeout=120)
    assert all(result == results[0] for result in results)


WEIGHT = "decoder.layers.0.linear.weight"


def descend(rank: int, world: int, method: GradientMethod | None) -> float:
    """Distance to the optimum of a sum of quadratics, one term a rank, after gradient descent."""
    generator = torch.Generator().manual_seed(0)
    goals = torch.randn(world, 32, 32, generator=generator)
    x = {WEIGHT: torch.zeros(32, 32)}
    best = goals.mean(0)
    scale = torch.linspace(0.2, 1.0, 32)
    if isinstance(method, SparseLoCo):
        method.begin(x)
    for step in range(100):
        gradient = {WEIGHT: scale * (x[WEIGHT] - goals[rank])}
        if method is None:
            gradient = {WEIGHT: mean_over_ranks(gradient[WEIGHT])}
        elif method.operates_on == "gradients":
            method.reduce(gradient, step)
        x[WEIGHT] = x[WEIGHT] - 0.15 * gradient[WEIGHT]
        if method is not None and method.operates_on == "parameters":
            method.reduce(x, step)
    return float((x[WEIGHT] - best).norm() / best.norm())


def convergence(rank: int, world: int) -> dict[str, float]:
    found = {"plain": descend(rank, world, None)}
    for name in MAKERS:
        found[name] = descend(rank, world, MAKERS[name](dist.group.WORLD))
    forgetful = TopK(dist.group.WORLD, ratio=0.1, selection="sort", error_feedback=False)
    found["topk without residual"] = descend(rank, world, forgetful)
    return found


def test_methods_converge_on_a_quadratic_whose_ranks_disagree(run_ranks: RankRunner) -> None:
    found = run_ranks(convergence, 2, timeout=120)[0]
    assert found["plain"] < 0.02
    for name in ("homomorphic", "pactrain", "cd_adam"):
        assert found[name] == pytest.approx(found["plain"], rel=0.02), name
    for name, bound in {
        "powersgd": 0.03,
        "topk": 0.2,
        "topk sort": 0.25,
        "tagc": 0.25,
        "sparseloco": 0.4,
        "sparseloco int8": 0.2,
        "pactrain ternary": 0.4,
    }.items():
        assert found[name] < bound, f"{name}: {found[name]:.4f}"
    # Without its residual top-k stalls: what the ranks push in opposite ways is all that it sends.
    assert found["topk without residual"] > 2 * found["topk sort"]


def refusals(rank: int, world: int) -> None:
    group = dist.group.WORLD
    method = TopK(group)
    method.reduce(gradients(rank, 0), 0)
    state = method.state_dict()
    with pytest.raises(ValueError, match=f"rank {rank} of 8 and this is rank {rank} of {world}"):
        TopK(group).load_state_dict({**state, "world_size": 8})
    with pytest.raises(ValueError, match="tagc: the state is of method 'topk'"):
        TAGC(group).load_state_dict(state)
    # What all ranks share is loaded at any size.
    mask = PacTrain(group)
    mask.reduce({"x": torch.ones(3)}, 0)
    PacTrain(group).load_state_dict({**mask.state_dict(), "world_size": 8})
    with pytest.raises(RuntimeError, match=r"begin\(\) was not called"):
        SparseLoCo(group).reduce(gradients(rank, 0), 0)
    bad: tuple[tuple[type, dict[str, Any], str], ...] = (
        (TopK, {"ratio": 0.0}, "topk: ratio is 0.0, allowed is above 0"),
        (TopK, {"selection": "best"}, "selection is 'best', allowed are sort, sidco"),
        (TopK, {"start_step": -1}, "start_step is -1"),
        (PowerSGD, {"rank": 0}, "powersgd: rank is 0"),
        (SparseLoCo, {"local_steps": 0}, "sparseloco: local_steps is 0, allowed is 1 or more"),
        (SparseLoCo, {"chunk": 40_000}, "chunk is 40000, allowed is 1 to 32768"),
        (TAGC, {"ratio": 1.0}, "tagc: ratio is 1.0"),
        (TAGC, {"packing": "zip"}, "tagc: packing is 'zip'"),
        (Homomorphic, {"packing": "zip"}, "homomorphic: packing is 'zip'"),
    )
    for kind, settings, message in bad:
        with pytest.raises(ValueError, match=message):
            kind(group, **settings)


def test_refusals_name_what_was_found(run_ranks: RankRunner) -> None:
    run_ranks(refusals, 2)
    assert set(METHODS) == {name.split()[0] for name in MAKERS}
