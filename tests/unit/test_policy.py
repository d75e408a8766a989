"""Decisions of `auto`: the rule, the break-even, sizes that were not measured, the record."""

import json
from pathlib import Path

import pytest

from megatron_taco.collectives.policy import MARGIN, Measured, Policy
from megatron_taco.patching.flows import FlowCheck, FlowCheckError
from megatron_taco.patching.policy_table import explain, explanations
from megatron_taco.telemetry.counters import Flow, FlowCount, FlowTotal


def measured(
    plain_s: float,
    compressed_s: float,
    *,
    raw: int = 100,
    wire: int = 50,
    role: str = "tp.forward",
    collective: str = "all_reduce",
    nbytes: int = 2**20,
) -> Measured:
    return Measured(
        role=role,
        collective=collective,
        nbytes=nbytes,
        raw=raw,
        wire=wire,
        plain_s=plain_s,
        compressed_s=compressed_s,
    ).decided()


def test_compression_has_to_save_more_than_the_margin() -> None:
    assert measured(1.0, 1.0 - MARGIN - 1e-6).compress
    assert not measured(1.0, 1.0 - MARGIN).compress
    assert not measured(1.0, 1.5).compress


def test_break_even_by_hand() -> None:
    """100 bytes in 1 s; 50 bytes in 1.5 s are 1 s of overhead; at 50 B/s both take 2 s."""
    item = measured(1.0, 1.5)
    assert (item.rate, item.overhead_s, item.break_even) == (100.0, 1.0, 50.0)
    assert item.overhead_known
    free = measured(1.0, 0.5)
    assert not free.overhead_known
    assert free.break_even == pytest.approx(50 / (0.02 * 0.5))
    assert measured(1.0, 1.5, wire=120).break_even == 0.0


def test_what_it_would_take_is_said() -> None:
    raw, wire = 120_000_000, 62_000_000
    overhead = (raw - wire) / 31e9
    loses = measured(raw / 240e9, wire / 240e9 + overhead, raw=raw, wire=wire)
    assert explain(loses) == "plain is faster here: break-even at 31 GB/s, this link gives 240 GB/s"
    wins = measured(raw / 1.25e9, wire / 1.25e9 + overhead, raw=raw, wire=wire)
    assert explain(wins) == (
        "compressed is 1.87x as fast here: it wins on links up to about 31 GB/s, "
        "this link gives 1.2 GB/s"
    )
    slow = measured(raw / 0.02e9, wire / 0.02e9 + overhead, raw=raw, wire=wire)
    assert "it wins on links at least up to" in explain(slow)
    assert "this link gives 20 MB/s" in explain(slow)
    assert "saves only 2.0%" in explain(measured(1.0, 0.98))
    assert "sends no fewer bytes" in explain(measured(1.0, 1.2, wire=100))


def test_roles_with_the_same_measurement_share_a_line() -> None:
    policy = Policy((measured(2.0, 1.0), measured(2.0, 1.0, role="tp.backward")), {})
    assert [line.partition(" all_reduce")[0] for line in explanations(policy)] == [
        "tp.forward, tp.backward"
    ]


def test_other_sizes_are_decided_as_the_nearest_by_logarithm() -> None:
    policy = Policy(
        (
            measured(1.0, 2.0, nbytes=1 << 20),
            measured(2.0, 1.0, nbytes=1 << 24),
            measured(1.0, 2.0, nbytes=1 << 20, collective="all_gather"),
            measured(2.0, 1.0, nbytes=1 << 20, collective="all_gather", role="tp.backward"),
        ),
        {},
    )
    decisions = {
        n: policy.compresses("tp.forward", "all_reduce", n)
        for n in (1, 1 << 20, (1 << 22) - 4096, (1 << 22) + 4096, 1 << 24, 1 << 30)
    }
    assert list(decisions.values()) == [False, False, False, True, True, True]
    assert not policy.compresses("tp.forward", "all_gather", 1 << 20)
    assert policy.compresses("tp.backward", "all_gather", 1 << 20)
    assert policy.compresses("tp.embedding", "all_reduce", 1 << 24), "decided as another role's"
    assert not policy.compresses("tp.forward", "reduce_scatter", 1 << 24), "never measured: plain"
    assert not policy.all_plain


def test_the_record_is_read_back_and_compared(tmp_path: Path) -> None:
    facts = {"tensor_model_parallel_size": 2, "device": "NVIDIA H200"}
    policy = Policy((measured(2.0, 1.0), measured(1.0, 2.0, role="tp.backward")), facts)
    path = tmp_path / "policy.json"
    path.write_text("of an earlier run")
    policy.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]
    again = Policy.from_dict(json.loads(path.read_text()))
    assert again == policy
    assert again.differences(facts) == []
    assert again.differences({"tensor_model_parallel_size": 4, "device": "NVIDIA H200"}) == [
        "tensor_model_parallel_size was 2, is 4"
    ]
    assert again.differences({**facts, "new": 1}) == ["new was not recorded, is 1"]
    with pytest.raises(ValueError, match="not a policy of this version"):
        Policy.from_dict({"facts": {}, "measured": [{"role": "tp.forward"}]})


FLOW = Flow("tp.forward", "all_reduce")


def total(**counts: int) -> FlowTotal:
    numbers = {"small": 0, "by_policy": 0, "compressed": 0} | counts
    return FlowTotal(
        flow=FLOW, raw=2, wire=1, nonfinite_blocks=0, error=None, largest=64, **numbers
    )


def test_the_end_table_says_how_the_calls_went() -> None:
    assert total(seen=4, compressed=4).sent == "compressed"
    assert total(seen=4, by_policy=4).sent == "plain by policy"
    assert total(seen=4, small=4).sent == "plain: small"
    assert total(seen=4).sent == "plain"
    assert total(seen=1004, compressed=1000, small=1).sent == (
        "1,000 compressed, 1 plain: small, 3 plain"
    )
    assert FlowCount().numbers()[2] == 0.0


@pytest.mark.parametrize("counts", [{"by_policy": 8}, {"small": 8}, {"compressed": 8}])
def test_under_auto_a_flow_may_go_plain_but_must_be_seen(counts: dict[str, int]) -> None:
    """Contract 7."""
    found: list[FlowTotal] = [total(seen=8, **counts)]

    def check(plain_passes: bool) -> FlowCheck:
        return FlowCheck(
            totals=lambda: found,
            expected=[FLOW],
            start_step=0,
            min_bytes=1024,
            plain_passes=plain_passes,
        )

    def two_steps(check: FlowCheck) -> None:
        check.step_done(0)
        check.step_done(1)

    two_steps(check(True))
    if "compressed" not in counts:
        with pytest.raises(FlowCheckError, match="never compressed"):
            two_steps(check(False))
    found[0] = total(seen=0)
    with pytest.raises(FlowCheckError, match="seen on no rank"):
        two_steps(check(True))
