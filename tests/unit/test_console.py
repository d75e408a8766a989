"""The lines that rank 0 prints."""

from megatron_taco.telemetry.console import step_line


def test_a_step_says_what_is_left() -> None:
    line = step_line(
        iteration=100, last_iteration=1000, loss=2.5, grad_norm=1.25, learning_rate=3e-4,
        step_ms=2000.0, tokens_per_s=65_536.0, ratios=[("tp.forward", 0.516)], skipped=False,
    )  # fmt: skip
    assert line.startswith("step  100/1000 | loss 2.5000 | grad norm 1.250 | lr 3.00e-04 | 2000 ms")
    assert line.endswith("wire/raw tp.forward 0.516 | left 0:30:00")
    assert "| skipped |" in step_line(
        iteration=1, last_iteration=2, loss=None, grad_norm=None, learning_rate=None,
        step_ms=1.0, tokens_per_s=1.0, ratios=[], skipped=True,
    )  # fmt: skip
