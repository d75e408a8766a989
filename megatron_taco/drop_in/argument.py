"""What the patches in ``patches/`` call: ``--compression-config FILE`` of a patched Megatron-LM."""

from __future__ import annotations

from megatron_taco.drop_in.install import install
from megatron_taco.drop_in.refusals import exit_on_refusal


def install_from_argument(config: str) -> None:
    """Compress as a file says; a mistake in it ends the process after one line.

    Args:
        config: path of the YAML file.
    """
    with exit_on_refusal():
        install(config, exit_on_mistake=True)
