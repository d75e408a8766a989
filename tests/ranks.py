"""``run_ranks``: runs a function on several gloo ranks, in fresh processes, for a test."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.zygote import PRELOADS, Exit, Job

LOG_TAIL = 6000
"""Characters of a failed rank's output that an error shows."""
ZYGOTE_ENVIRON = {
    # One thread, so that forking is safe and ranks do not fight over the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Read by torch when it is imported. Megatron decorates with torch.compile at import, which on
    # a CPU would compile for minutes.
    "TORCHDYNAMO_DISABLE": "1",
}


class Zygote:
    """The parent's end of one ``zygote.py`` process."""

    def __init__(self, preload: str) -> None:
        """Starts the process and waits until it has imported what ``preload`` names."""
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._connection = Connection(ours.detach())
        root = str(Path(__file__).parent.parent)
        # With -c the child has no main file that a spawned grandchild would import again.
        code = "from tests.zygote import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), preload],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                **ZYGOTE_ENVIRON,
                "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
                "PYTHONSAFEPATH": "1",
            },
        )
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self.close()
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")[-LOG_TAIL:]
            raise RuntimeError(f"the process that forks test ranks ended:\n{text}") from error

    def run(self, job: Job) -> list[Exit]:
        """Runs a job; every rank has ended when this returns."""
        self._connection.send(job)
        exits: list[Exit] = self._answer()
        return exits

    def close(self) -> None:
        """Ends the process, and with it any rank that still runs."""
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankRunner:
    """Callable behind the ``run_ranks`` fixture; keeps one zygote per preload set."""

    def __init__(self) -> None:
        """Starts nothing: a zygote starts with the first call that needs it."""
        self._zygotes: dict[str, Zygote] = {}

    def __call__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        init: bool = True,
        cwd: str | os.PathLike[str] | None = None,
        preload: str | None = None,
    ) -> list[Any]:
        """Runs ``fn(rank, world_size, *args)`` in ``world_size`` fresh processes over gloo.

        Args:
            fn: A function at the top of its module. Arguments and results travel by pickle.
            world_size: Number of ranks, at least 1.
            *args: Further arguments of ``fn``, the same on all ranks.
            timeout: Seconds until everything is killed; also the process group's timeout.
            env: Environment variables to set on all ranks, on top of the test's own.
            init: Call ``init_process_group("gloo")`` before ``fn`` and destroy it after. Without
                it ``fn`` does so itself: the variables that torchrun sets are set in both cases.
            cwd: Folder to run in.
            preload: What the ranks find imported already, "torch" or "megatron" (without any
                shim). By default "torch", with ``init=False`` "megatron".

        Returns:
            The results, by rank.

        Raises:
            AssertionError: A rank raised, died or took too long; with its traceback and output.
        """
        module = sys.modules[fn.__module__]
        if "<" in fn.__qualname__ or module.__file__ is None:
            raise TypeError(f"run_ranks needs a module-level function, got {fn.__qualname__}")
        preload = preload or ("torch" if init else "megatron")
        if preload not in PRELOADS:
            raise ValueError(f"preload is one of {', '.join(PRELOADS)}, got {preload!r}")

        # The session hosts the store, as torchrun's agent does: the port is taken from the
        # start, so calls and sessions side by side cannot clash.
        from torch.distributed import TCPStore

        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        environ = {
            **os.environ,
            **{key: ZYGOTE_ENVIRON[key] for key in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            **(env or {}),
        }
        folder = Path(tempfile.mkdtemp(prefix="run_ranks_"))
        try:
            job = Job(
                folder=str(folder),
                world_size=world_size,
                module=fn.__module__,
                source=module.__file__,
                qualname=fn.__qualname__,
                arguments=pickle.dumps(args),
                timeout=timeout,
                init=init,
                cwd=None if cwd is None else os.fspath(cwd),
                sys_path=[p or os.getcwd() for p in sys.path],
                environ=environ,
                rank_environ=[{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world_size)],
            )
            exits = self._zygote(preload).run(job)
            bad = [e for e in exits if e.status != 0]
            if bad:
                raise AssertionError(_describe(job, bad, len(exits) - len(bad)))
            return [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world_size)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            del store

    def _zygote(self, preload: str) -> Zygote:
        if preload not in self._zygotes:
            self._zygotes[preload] = Zygote(preload)
        return self._zygotes[preload]

    def close(self) -> None:
        """Ends all zygotes."""
        while self._zygotes:
            self._zygotes.popitem()[1].close()


def _describe(job: Job, bad: list[Exit], good: int) -> str:
    """One text about all ranks that failed, the first to fail first."""
    lines = [
        f"{job.qualname}: {len(bad)} of {job.world_size} ranks failed ({good} returned), "
        "in this order:"
    ]
    for end in bad:
        error, log = (Path(job.folder, f"{kind}{end.rank}") for kind in ("error", "log"))
        if end.status is None:
            how = f"still running after {end.after_s:.1f} s, killed"
            how += " (timeout)" if end.after_s >= job.timeout else " (another rank had failed)"
        elif error.exists():
            how = f"raised after {end.after_s:.1f} s"
        else:
            how = f"died with exit code {end.status} after {end.after_s:.1f} s"
        lines.append(f"--- rank {end.rank} {how}")
        if error.exists():
            lines.append(error.read_text().rstrip())
        text = log.read_text(errors="replace").rstrip() if log.exists() else ""
        if text:
            lines.append(f"... output of rank {end.rank}:\n{text[-LOG_TAIL:]}")
    return "\n".join(lines)
