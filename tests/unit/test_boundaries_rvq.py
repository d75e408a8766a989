"""Residual vector quantisation: codes, the streamed codebook, its start and its dead codes."""

from itertools import pairwise

import pytest
import torch

from megatron_taco.boundaries import codebooks
from megatron_taco.boundaries.rvq import ResidualVQ
from megatron_taco.boundaries.rvq_settings import RvqSettings
from tests.unit.boundary_cases import noise, relative_error

SMALL = RvqSettings(codes=8, rounds=2, warmup_steps=1, sample=64, parts=4, decay=0.5)
SHAPE = (10, 4, 16)


def batch(seed: int) -> torch.Tensor:
    """Return a micro-batch FP32 of SHAPE."""
    return noise(*SHAPE, seed=seed)


def trained(settings: RvqSettings = SMALL, ends: str = "both", steps: int = 1) -> ResidualVQ:
    """Return a quantiser after ``steps`` steps of two micro-batches."""
    quantizer = ResidualVQ(SHAPE[2], settings, 0, 1, ends)
    for step in range(steps):
        for number in range(2):
            quantizer.encode(batch(10 * step + number), learn=True)
        quantizer.codebook.end_step(quantizer.codebook.statistics())
    return quantizer


def test_codes_are_the_nearest_of_each_round():
    quantizer = trained()
    z = batch(99).view(-1, 16)
    residual, expected = z.view(-1, 4, 4), torch.zeros(40, 4, 4)
    tables = quantizer.codebook.table
    rounds = list(codebooks.assign(z, tables))
    for table, (codes, seen) in zip(tables, rounds, strict=True):
        assert torch.equal(seen, residual)
        distance = (residual[:, :, None] - table[None]).square().sum(3)
        assert torch.equal(codes, distance.argmin(2))
        residual = residual - table[torch.arange(4), codes]
        expected = expected + table[torch.arange(4), codes]
    decoded = quantizer.decode(quantizer.encode(batch(99)), SHAPE, torch.float32)
    assert torch.equal(decoded.view(-1, 4, 4), expected)


@pytest.mark.parametrize(("rounds", "bound"), [(4, 0.0275), (2, 0.117)])
def test_error_of_a_decaying_spectrum_is_near_the_expected_one(rounds, bound):
    spread = torch.exp(-torch.arange(16) / 8)
    settings = RvqSettings(rounds=rounds, warmup_steps=1, iterations=6)
    quantizer = ResidualVQ(16, settings, 0, 1)
    quantizer.encode(noise(64, 128, 16) * spread, learn=True)
    quantizer.codebook.end_step(quantizer.codebook.statistics())
    fresh = noise(32, 128, 16, seed=1) * spread
    # 2.3% and 11.0% with codebooks in equilibrium; this one has seen 32 vectors for each code
    assert 0.8 * bound < relative_error(quantizer.cross(fresh, False), fresh) < bound
    assert quantizer.encoded_bytes((1, 8, 16), torch.bfloat16) == 8 * 4 * rounds + 1


def test_learning_lowers_the_error():
    settings = RvqSettings(codes=32, rounds=2, warmup_steps=1, sample=64, decay=0.8, parts=2)
    quantizer = ResidualVQ(16, settings, 0, 1)
    fresh = noise(64, 16, 16, seed=1000)
    errors = []
    for step in range(25):
        for number in range(2):
            quantizer.encode(noise(32, 16, 16, seed=10 * step + number), learn=True)
        quantizer.codebook.end_step(quantizer.codebook.statistics())
        errors.append(relative_error(quantizer.cross(fresh, False), fresh))
    assert errors[-1] < 0.85 * errors[0]


def test_both_ends_have_the_same_table_at_every_use():
    sender, receiver = (ResidualVQ(16, SMALL, 0, 1, ends) for ends in ("sender", "receiver"))
    tables = []
    for step in range(8):
        assert torch.equal(sender.codebook.table, receiver.codebook.table)
        tables.append(sender.codebook.table.clone())
        for number in range(3):
            x = batch(10 * step + number)
            message = sender.pack(x, learn=True)
            arrived = receiver.unpack(message, SHAPE, torch.float32, learn=True)
            assert torch.equal(arrived, sender.cross(x, False))
            assert torch.equal(sender.codebook.table, tables[-1])  # constant within a step
            assert torch.equal(receiver.codebook.table, tables[-1])
        skipped = step == 4
        for end in (sender, receiver):
            end.codebook.end_step(end.codebook.statistics(), skipped)
    assert sender.codebook.step == receiver.codebook.step == 7
    assert receiver.codebook.counts is None
    changed = [not torch.equal(a, b) for a, b in pairwise(tables)]
    assert changed == [True, False, True, True, True, True, True]  # parts of step 1 are not newer


def test_every_part_is_refreshed_once_in_a_cycle():
    quantizer = trained(steps=2)
    codebook = quantizer.codebook
    codebook.counts.fill_(1.0)
    codebook.sums.fill_(7.0)
    untouched = []
    for _ in range(2):
        for number in range(2):
            quantizer.encode(batch(number), learn=True)
        codebook.end_step(None, skipped=True)
        untouched.append(int((codebook.table != 7.0).sum()))
    # two of four parts of a step were carried by now, then all
    assert untouched == [codebook.table.numel() // 2, 0]


def test_a_step_with_more_micro_batches_than_parts_is_the_same_at_both_ends():
    sender, receiver = (trained(ends=ends) for ends in ("sender", "receiver"))
    receiver.codebook.table.copy_(sender.codebook.table)
    sender.codebook.sums.add_(1.0)
    for number in range(7):
        message = sender.pack(batch(number), learn=True)
        receiver.unpack(message, SHAPE, torch.float32, learn=True)
    for end in (sender, receiver):
        end.codebook.end_step(end.codebook.statistics())
    assert torch.equal(sender.codebook.table, receiver.codebook.table)


def test_replicas_learn_from_the_sum():
    one = ResidualVQ(16, SMALL, 0, 1)
    replicas = [ResidualVQ(16, SMALL, 0, 1) for _ in range(2)]
    for step in range(3):
        parts = [batch(10 * step), batch(10 * step + 1)]
        vectors = []
        for number, (replica, x) in enumerate(zip(replicas, parts, strict=True)):
            replica.encode(x, learn=True)
            vectors.append(replica.codebook.statistics(number, 2))
        for replica in replicas:
            replica.codebook.end_step(vectors[0] + vectors[1])
        assert torch.equal(replicas[0].codebook.table, replicas[1].codebook.table)
        assert torch.equal(replicas[0].codebook.counts, replicas[1].codebook.counts)
        if step == 0:  # from here on, one process with both micro-batches has the same sums
            one.codebook.load_state_dict(replicas[0].codebook.state_dict())
            continue
        for x in parts:
            one.encode(x, learn=True)
        one.codebook.end_step(one.codebook.statistics())
        assert torch.allclose(one.codebook.counts, replicas[0].codebook.counts)
        assert torch.allclose(one.codebook.sums, replicas[0].codebook.sums, atol=1e-5)
        break  # from here on it has carried more parts than they


def test_samples_of_replicas_come_from_all_of_them():
    replicas = [ResidualVQ(16, SMALL, 0, 1) for _ in range(2)]
    samples = []
    for number, replica in enumerate(replicas):
        replica.encode(torch.full(SHAPE, number + 1.0), learn=True)
        samples.append(replica.codebook.statistics(number, 2))
    rows = (samples[0] + samples[1]).view(-1, 16)
    assert rows[:, 0].tolist() == [1.0, 2.0] * 32


def test_dead_codes_move_to_vectors_of_the_batch():
    quantizer = trained()
    codebook = quantizer.codebook
    far = torch.tensor([500.0, 500.0, 500.0, 500.0])
    codebook.table[0, :, 3] = far
    codebook.counts[0, :, 3] = 0.0
    codebook.sums[0, :, 3] = far * 1e-6
    x = batch(50)
    for _ in range(3):
        quantizer.encode(x, learn=True)
    codebook.end_step(codebook.statistics())
    fresh = codebook._newest()[0, :, 3]
    for group in range(4):
        vectors = x.view(-1, 4, 4)[:, group]
        assert float((vectors - fresh[group]).abs().amax(1).min()) < 1e-5
    alive = codebook.counts[0, :, 3] / codebook.counts[0].mean(1)
    assert alive.tolist() == pytest.approx([0.1] * 4, rel=0.2)


def test_nothing_is_learned_without_being_asked():
    quantizer = trained()
    before = {k: v.clone() for k, v in quantizer.state_dict().items() if hasattr(v, "clone")}
    quantizer.cross(batch(5), False)
    quantizer.encode(batch(6))
    with pytest.raises(ValueError, match="boundary 1: step 1 saw no micro-batch"):
        quantizer.codebook.statistics()
    for key, value in before.items():
        assert torch.equal(value, quantizer.state_dict()[key])


def test_the_same_steps_give_the_same_state_and_a_resumed_run_goes_on():
    straight, again = trained(steps=5), trained(steps=5)
    resumed = ResidualVQ(16, SMALL, 0, 1)
    resumed.load_state_dict(trained(steps=3).state_dict())
    for step in (3, 4):
        for number in range(2):
            resumed.encode(batch(10 * step + number), learn=True)
        resumed.codebook.end_step(resumed.codebook.statistics())
    for other in (again, resumed):
        assert other.codebook.step == 5
        for key, value in straight.state_dict().items():
            found = other.state_dict()[key]
            assert torch.equal(value, found) if torch.is_tensor(value) else value == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_during_the_warm_up_everything_crosses_as_it_is(dtype):
    quantizer = ResidualVQ(16, RvqSettings(warmup_steps=2), 0, 1)
    x = batch(0).to(dtype)
    assert torch.equal(quantizer.cross(x, True), x)
    assert quantizer.message_bytes(SHAPE, dtype, True) == x.numel() * dtype.itemsize
    assert quantizer.codebook.statistics() is None
    quantizer.codebook.end_step(None)
    with pytest.raises(ValueError, match="boundary 1: step 1 has no statistics"):
        quantizer.codebook.end_step(None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_decodes_to_nan_and_teaches_nothing(bad):
    quantizer = trained()
    x = batch(5)
    x[3, 2, 7] = bad
    decoded = quantizer.decode(quantizer.encode(x, learn=True), SHAPE, torch.float32)
    assert decoded[3, 2].isnan().all()
    assert int(decoded.isnan().sum()) == 16
    statistics = quantizer.codebook.statistics()
    assert statistics.isfinite().all()
    assert float(statistics[: 2 * 4 * 8].sum()) == 2 * 4 * (40 - 1)


def test_parts_out_of_order_and_receivers_that_send_are_refused():
    receiver = trained(ends="receiver")
    with pytest.raises(ValueError, match="a receiver has no parts to send"):
        receiver.pack(batch(0), learn=True)
    part = torch.zeros(receiver.codebook.part_values)
    with pytest.raises(ValueError, match="got part 1 of 64 values, expected part 0 of 64"):
        receiver.codebook.receive_part(1, part)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("codes", 257, "2 .. 256"),
        ("rounds", 0, "1 or more"),
        ("parts", 3, r"0 and the divisors of 256 \(codes\)"),
        ("decay", 1.0, "0 <= decay < 1"),
        ("sample", 100, r"256 \(codes\) or more"),
        ("warmup_steps", 0, "1 or more"),
    ],
)
def test_bad_settings_are_refused(field, value, allowed):
    with pytest.raises(ValueError, match=f"rvq: {field} is {value}, allowed is {allowed}"):
        RvqSettings(**{field: value})
    with pytest.raises(ValueError, match=r"width is 4, allowed are divisors of 6 \(rank\)"):
        ResidualVQ(6, SMALL, 0, 1)
