"""Which boundaries leave the same model behind when they are taken out, and why others do not."""

import pytest

from megatron_taco.boundaries import BoundarySettings, QuantizerSettings
from megatron_taco.patching.boundary_fold import obstacle

INT8 = QuantizerSettings("int8")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (BoundarySettings("subspace", 64, 16, 128, "static"), None),
        (BoundarySettings("mapl", 64, 64), None),
        (BoundarySettings("fixed", 64, 64, 128, "static", backward=INT8), None),
        (BoundarySettings("mapl", 64, 16), "rank 16 acts on the residual stream of size 64"),
        (BoundarySettings("mapl", 64, 64, forward=INT8), "int8 rounds what crosses"),
        (BoundarySettings("mapl", 64, 64, 128, "full"), "the anchors of two segments differ"),
        (BoundarySettings("subspace", 64, 16, 128, "static", forward=INT8), "int8 rounds what"),
        (BoundarySettings("learned_unconstrained", 64, 64), "its projector is not orthonormal"),
        (BoundarySettings("residual_bottleneck", 64, 16), "layers of their own"),
        (BoundarySettings("tah_quant", 64), "tah_quant rounds the activations"),
    ],
)
def test_what_can_be_folded(settings: BoundarySettings, reason: str | None) -> None:
    found = obstacle(settings)
    assert found is None if reason is None else reason in (found or "")
