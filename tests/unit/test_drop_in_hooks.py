"""What `install` puts in place at first, and that `undo` leaves nothing of it."""

import subprocess
import sys
from types import ModuleType

import pytest

import megatron_taco

SETTINGS = {"compression": {"tensor_parallel": {"mode": "on"}}}
NAMES = ("setup_model_and_optimizer", "pretrain")


def test_importers_by_value_are_met_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron is imported before `install`, and by a module of the user's, by value."""
    import megatron.training
    import megatron.training.training as loop

    user = ModuleType("a_module_of_the_users")
    monkeypatch.setitem(sys.modules, user.__name__, user)
    before = {name: getattr(loop, name) for name in NAMES}
    vars(user).update(before)
    every = {name: dict(vars(module)) for name, module in list(sys.modules.items())
             if name.startswith("megatron.")}  # fmt: skip
    with megatron_taco.install(SETTINGS):
        for name in NAMES:
            assert getattr(loop, name) is not before[name]
            assert getattr(user, name) is getattr(loop, name)
        assert megatron.training.pretrain is loop.pretrain
        from megatron.core.tensor_parallel import layers

        assert layers.torch is sys.modules["torch"], "communication is left alone until it starts"
    assert {name: getattr(user, name) for name in NAMES} == before
    for name, attributes in every.items():
        now = vars(sys.modules[name])
        assert all(now[key] is value for key, value in attributes.items()), name


def test_nothing_is_imported_ahead_of_the_script() -> None:
    code = (
        "import sys, megatron_taco\n"
        "taco = megatron_taco.install({'compression': {'tensor_parallel': {'mode': 'on'}}})\n"
        "assert not any(m.split('.')[0] in ('torch', 'megatron') for m in sys.modules)\n"
        "assert len(sys.meta_path) == before + 1\n"
        "taco.undo()\n"
        "assert len(sys.meta_path) == before\n"
    )
    code = "import sys\nbefore = len(sys.meta_path)\n" + code
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
