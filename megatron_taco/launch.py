"""``torchrun ... -m megatron_taco.launch --compression FILE script.py ...``: your own script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

OK, FAILED = 0, 1
_OTHER_LAUNCHERS = {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
"""Variables of launchers whose ranks a script may work out by itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a training script with compression; returns the exit code.

    Args:
        argv: arguments without the program's name; ``sys.argv`` by default.

    Returns:
        0 done, 1 failed, 2 the user's mistake; a code that the script exits with is passed on.
    """
    from megatron_taco.config import ConfigError, load_settings
    from megatron_taco.drop_in.command_line import parse
    from megatron_taco.drop_in.refusals import refuse
    from megatron_taco.drop_in.script import check_script, run_script
    from megatron_taco.training.launch_env import ranks_from_environment

    script = None
    try:
        launch = parse(sys.argv[1:] if argv is None else argv)
        check_script(launch.script)
        settings = load_settings(launch.compression, launch.overrides)
        if not _OTHER_LAUNCHERS & os.environ.keys():
            ranks_from_environment()  # without torchrun a run of one process, as in the trainer
        from megatron_taco.drop_in.install import install

        drop_in = install(settings, run_dir=launch.run_dir, device=launch.device)
        script = launch.script
        run_script(script, launch.arguments)
        if settings.compression.enabled and not drop_in.started:
            raise ConfigError(
                f"{script} has ended and nothing was compressed: it never called "
                "megatron.training's pretrain(); a loop of your own calls "
                "megatron_taco.install(...) and start() itself"
            )
        return OK
    except Exception as error:  # the last handler of the process
        code = refuse(error)
        if code is None:
            trace = _from_script(error.__traceback__, script)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return FAILED
        return code


def _from_script(trace: TracebackType | None, script: str | None) -> TracebackType | None:
    """A traceback without the frames above the script, as Python itself would show it."""
    whole = trace
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace or whole


if __name__ == "__main__":
    sys.exit(main())
