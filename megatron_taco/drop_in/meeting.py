"""Before a session starts the ranks agree on it, and rank 0 takes the run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_taco.config import ConfigError, Settings
from megatron_taco.training.agreement import START_TIMEOUT, agree
from megatron_taco.training.launch_env import Ranks
from megatron_taco.training.run_folder import RunFolder, versions

_FOLDER = "megatron_taco/folder"


@contextlib.contextmanager
def meet(settings: Settings, path: Path, *, resumes: bool) -> Iterator[RunFolder]:
    """Agree on the settings (contract 8), then hold the run folder; all ranks call it.

    Args:
        settings: what this rank has.
        path: the run folder; rank 0's counts.
        resumes: whether the run goes on from a checkpoint.

    Raises:
        ConfigError: the ranks differ, a rank does not answer in time, or the folder is not to be
            had; on all ranks alike.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "compression was started before torch.distributed; initialise it first, and "
            "Megatron's parallel groups after it"
        )
    ranks = Ranks(
        rank=dist.get_rank(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=dist.get_world_size(),
    )
    # A process may train more than once in one process group: each time has keys of its own.
    store = dist.distributed_c10d._get_default_store()
    time = store.add(f"megatron_taco/starts/{ranks.rank}", 1)
    store = dist.PrefixStore(f"megatron_taco/start{time}", store)
    agree(store, ranks, settings.canonical(), "configuration")
    agree(store, ranks, versions(), "environment")
    folder = RunFolder(path)
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            store.set(_FOLDER, _claim(folder, settings, stack, resumes=resumes))
        store.wait([_FOLDER], START_TIMEOUT)
        said = store.get(_FOLDER).decode()
        if said:
            raise ConfigError(said)
        yield folder


def _claim(
    folder: RunFolder, settings: Settings, stack: contextlib.ExitStack, *, resumes: bool
) -> str:
    """Take the folder; returns why it is not to be had, or an empty text."""
    from megatron_taco.data import DataError

    try:
        stack.enter_context(folder.claimed(settings.to_yaml(), resume=resumes))
    except (OSError, DataError) as error:
        return f"run folder {folder.path}: {error}"
    return ""
