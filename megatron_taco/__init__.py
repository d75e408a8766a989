"""megatron_taco makes Megatron-LM train over slow links by compressing what its ranks exchange.

Importing the package changes nothing and needs neither torch nor megatron-core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from megatron_taco.drop_in.hooks import DropIn

__version__ = "0.1.0"


def install(
    config: str | Path | Mapping[str, Any],
    *,
    run_dir: str | Path | None = None,
    device: str | None = None,
) -> DropIn:
    """Compress what Megatron sends in this process; call it on all ranks, before a model is built.

    Whether Megatron is imported before or after makes no difference.  A script that calls
    Megatron's ``pretrain`` needs nothing else.  A loop of its own over ``megatron.core``::

        taco = megatron_taco.install("taco.yaml")
        ...                                     # process groups, TransformerConfig
        taco.start(transformer_config, position_embedding_type="rope")
        ...                                     # GPTModel, optimiser
        for number in range(steps):
            with taco.step(number):
                ...                             # forward, backward, optimiser step
        taco.finish()                           # checks and the end table, on all ranks
        taco.undo()                             # or use `with megatron_taco.install(...)`

    Args:
        config: a YAML file, or the same as a mapping, with ``compression`` and maybe ``telemetry``.
        run_dir: folder for ``metrics.jsonl`` and descriptions; by default ``megatron_taco/`` in
            Megatron's ``--save``, else ``megatron_taco_runs/`` and the script's name.
        device: ``cpu`` to let Megatron run without a GPU; otherwise nothing of that kind changes.

    Returns:
        A handle whose ``undo`` puts the very objects back that were replaced.

    Raises:
        ConfigError: a mistake in ``config``; each is one line.
        PatchError: Megatron is imported already, and is not one that we know.
    """
    from megatron_taco.drop_in.install import install as put_in_place

    return put_in_place(config, run_dir=run_dir, device=device)
