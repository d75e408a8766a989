"""What checkpoints say of their boundaries, and what is another model."""

from typing import Any

import pytest

from megatron_taco.boundaries import BoundarySettings, QuantizerSettings
from megatron_taco.patching.boundary_settings import SavedSettings, described
from megatron_taco.patching.errors import BoundaryError

DEPTHS = (2, 4)


def settings(**changes: Any) -> BoundarySettings:
    return BoundarySettings(**{"kind": "mapl", "hidden": 64, "rank": 16, "vocab": 128, **changes})


def rvq(**options: int) -> QuantizerSettings:
    return QuantizerSettings("rvq", options)


def refusal(saved: BoundarySettings, here: BoundarySettings) -> str:
    """What a model says to a checkpoint of another, '' if it loads it."""
    try:
        SavedSettings(here, DEPTHS).set_extra_state(SavedSettings(saved, DEPTHS).get_extra_state())
    except BoundaryError as error:
        return str(error)
    return ""


STATIC = {"kind": "fixed", "anchors": "static"}
INT8 = QuantizerSettings("int8", {})


@pytest.mark.parametrize(
    ("saved", "here", "key"),
    [
        ({**STATIC, "seed": 1}, {**STATIC, "seed": 2}, "seed: 2, "),
        ({"seed": 1}, {"seed": 2}, "seed: 2, "),
        ({"forward": rvq()}, {}, "quantizer.forward.kind: 'none', "),
        ({}, {"forward": rvq()}, "quantizer.forward.kind: 'rvq', "),
        ({}, {"forward": INT8}, "quantizer.forward.kind: 'int8', "),
        ({"forward": rvq()}, {"forward": rvq(codes=16, sample=16)}, "quantizer.forward.codes: 16,"),
        (
            {"forward": INT8},
            {"forward": QuantizerSettings("int8", {"block": 32})},
            "quantizer.forward.block: 32, ",
        ),
        ({"kind": "fixed"}, {}, "boundary: 'mapl', "),
        ({}, {"rank": 8}, "rank: 8, "),
        ({}, {"anchors": "full"}, "anchors: 'full', "),
    ],
)
def test_another_model_is_refused_by_key(
    saved: dict[str, Any], here: dict[str, Any], key: str
) -> None:
    if "block" in key:
        saved, here = {**saved, "rank": 64}, {**here, "rank": 64}
    said = refusal(settings(**saved), settings(**here))
    assert said.startswith(f"compression.pipeline_parallel.{key}")
    assert "but the checkpoint of megatron.load has " in said


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ({"kind": "fixed", "seed": 1}, {"kind": "fixed", "seed": 2}),
        ({"beta": 0.9}, {"backward": INT8}),
        ({"forward": rvq()}, {"forward": rvq(parts=4, sample=512)}),
    ],
)
def test_what_is_saved_or_only_trains_may_change(
    saved: dict[str, Any], here: dict[str, Any]
) -> None:
    assert refusal(settings(**saved), settings(**here)) == ""


def test_an_older_checkpoint_is_compared_by_what_it_says() -> None:
    older = described(settings(), DEPTHS)
    for key in ("quantizer.forward.kind", "seed"):
        del older[key]
    SavedSettings(settings(), DEPTHS).set_extra_state(older)
    with pytest.raises(BoundaryError, match=r"rank: 8, but the checkpoint .* has 16"):
        SavedSettings(settings(rank=8), DEPTHS).set_extra_state(older)
