"""A warm process that forks test ranks, so that ``import torch`` is paid for once a session.

:mod:`tests.ranks` starts :func:`main` with the arguments FD and PRELOAD, sends one :class:`Job` at
a time over the connection FD and gets one list of :class:`Exit` back. The zygote imports only what
PRELOAD names and runs no tensor operation, so it has a single thread and forking it is safe.

Every rank is the leader of a session of its own: what it leaves behind (a multiprocessing manager,
a data loader) is killed with it. If the test session goes away the connection closes, and the
zygote kills its ranks and ends.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADS: dict[str, tuple[str, ...]] = {
    "torch": ("torch", "torch.distributed", "pytest"),
    "megatron": (
        "torch",
        "torch.distributed",
        "pytest",
        "megatron.core",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.dist_checkpointing",
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.tokenizers.text",
        "megatron.training",
        "megatron.training.arguments",
        "megatron.training.training",
    ),
}

AFTER_FAILURE_S = 2.0
"""How long the other ranks may go on, to fail by themselves, once one has failed."""
STACKS_S = 0.5
"""How long ranks get to write their stacks before they are killed at a timeout."""
POLL_S = 0.005


@dataclass
class Job:
    """One ``run_ranks`` call: which function, where, and with which environment."""

    folder: str
    world_size: int
    module: str
    source: str
    qualname: str
    arguments: bytes
    timeout: float
    init: bool
    cwd: str | None
    sys_path: list[str]
    environ: dict[str, str]
    rank_environ: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Exit:
    """How one rank ended: its wait status, or None where it had to be killed."""

    rank: int
    status: int | None
    after_s: float


def _load(job: Job) -> Any:
    """Imports the module of the test function, by name or else by file, and finds the function."""
    if job.module in sys.modules:
        module = sys.modules[job.module]
    elif _importable(job.module, job.source):
        module = importlib.import_module(job.module)
    else:
        spec = importlib.util.spec_from_file_location(job.module, job.source)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {job.module} from {job.source}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in job.qualname.split("."):
        found = getattr(found, part)
    return found


def _importable(name: str, source: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(source)


def _run(job: Job, rank: int) -> None:
    """Runs one rank in the forked child and leaves ``result`` or ``error`` in the job's folder."""
    sys.path[:] = job.sys_path
    os.environ.clear()
    os.environ.update(job.environ)
    if job.rank_environ:
        os.environ.update(job.rank_environ[rank])
    if job.cwd is not None:
        os.chdir(job.cwd)

    import torch

    torch.set_num_threads(1)
    function = _load(job)
    arguments = pickle.loads(job.arguments)
    if job.init:
        from datetime import timedelta

        limit = timedelta(seconds=job.timeout)
        torch.distributed.init_process_group("gloo", timeout=limit)
    result = function(rank, job.world_size, *arguments)
    data = pickle.dumps(result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    Path(job.folder, f"result{rank}").write_bytes(data)


def _child(job: Job, rank: int, inherited: int) -> None:
    """The whole life of a rank. Never returns."""
    code = 1
    try:
        os.setsid()
        os.close(inherited)
        log = os.open(os.path.join(job.folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _run(job, rank)
        code = 0
    except BaseException:  # whatever ends a rank, SystemExit included, is for the test to see
        Path(job.folder, f"error{rank}").write_text(traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):  # a closed stream must not keep the child alive
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _kill(pid: int) -> None:
    """Kills a rank with everything it started. The rank itself is still to be waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # where it had not yet come to setsid


def _serve(job: Job, connection: Connection) -> list[Exit]:
    """Forks the ranks of a job and waits for them; none of them is alive when it returns."""
    start = time.monotonic()
    pids: dict[int, int] = {}
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            _child(job, rank, connection.fileno())
        pids[pid] = rank
    exits: list[Exit] = []
    deadline = start + job.timeout
    failed = gone = False
    while pids and not gone:
        for pid, rank in list(pids.items()):
            # WNOWAIT: the rank stays a zombie until what it left in its session is killed, so its
            # process id cannot have become another's by then.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill(pid)
            _, status = os.waitpid(pid, 0)
            del pids[pid]
            exits.append(Exit(rank, os.waitstatus_to_exitcode(status), time.monotonic() - start))
            if exits[-1].status != 0 and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        if time.monotonic() >= deadline:
            break
        ready, _, _ = select.select([connection], [], [], POLL_S if pids else 0)
        gone = bool(ready)  # nothing is sent during a job: the session has ended
    if pids and not gone:
        _signal(list(pids), signal.SIGUSR1)
        time.sleep(STACKS_S)
    for pid, rank in pids.items():
        _kill(pid)
        os.waitpid(pid, 0)
        exits.append(Exit(rank, None, time.monotonic() - start))
    return exits


def main() -> None:
    """Imports the preload set, then serves jobs until the connection closes."""
    connection = Connection(int(sys.argv[1]))
    warnings.filterwarnings("ignore")
    for name in PRELOADS[sys.argv[2]]:
        importlib.import_module(name)
    warnings.resetwarnings()
    connection.send("ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_serve(connection.recv(), connection))
