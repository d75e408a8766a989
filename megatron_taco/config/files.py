"""Files that a configuration names and that have to be there before a run starts."""

from collections.abc import Iterator
from pathlib import Path

from megatron_taco.config.config import Config
from megatron_taco.config.errors import Problem


def missing_files(config: Config) -> list[Problem]:
    """Return a problem for every data set or tokenizer that is not there.

    Args:
        config: A loaded configuration. Relative names are taken from the current folder.
    """
    return list(_missing(config))


def _missing(config: Config) -> Iterator[Problem]:
    for key in ("path", "train_path", "valid_path", "test_path"):
        for prefix in getattr(config.data, key) or ():
            if not isinstance(prefix, str):
                continue
            absent = [s for s in (".bin", ".idx") if not Path(prefix + s).is_file()]
            if absent:
                yield config.problem(
                    f"data.{key}",
                    f"there is no {prefix}{absent[0]}; a prefix names a .bin and an .idx file, "
                    "which `megatron-taco prepare-data` writes",
                )
    folder = config.data.tokenizer.path
    if folder is not None and not Path(folder).is_dir():
        yield config.problem(
            "data.tokenizer",
            f"there is no folder {folder}; hf names a local folder with a tokenizer.json",
        )
