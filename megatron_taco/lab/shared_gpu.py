"""Several ranks on one GPU: ``python -m megatron_taco.lab.shared_gpu --ranks 4 -- -m MODULE ...``.

NCCL refuses two ranks on one GPU of one host, but takes the host's name from ``NCCL_HOSTID``.  With
a different one for each rank it believes in as many hosts and sends everything over sockets, here
over the loopback interface.  So tensor, pipeline and data parallelism run on real GPU memory and on
NCCL with a single card.  The ranks share the card's time: losses and ratios mean something,
absolute times do not.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_POLL_S = 0.2
_AFTER_FAILURE_S = 15.0


def rank_environment(rank: int, ranks: int, port: int, device: int = 0) -> dict[str, str]:
    """The environment of one rank that shares GPU ``device`` with the others."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(device),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"megatron-taco-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(ranks: int, arguments: Sequence[str], *, timeout_s: float | None = None) -> int:
    """Run Python with ``arguments`` once for each rank; returns the first non-zero exit code.

    When one rank fails the others get some seconds to end by themselves and are then killed; no
    process is left behind.
    """
    port = free_port()
    command = [sys.executable, *arguments]
    processes = [
        subprocess.Popen(command, env=rank_environment(rank, ranks, port), start_new_session=True)
        for rank in range(ranks)
    ]
    start = time.monotonic()
    deadline = None if timeout_s is None else start + timeout_s
    code = 0
    try:
        while any(process.poll() is None for process in processes):
            failed = [p.returncode for p in processes if p.poll() not in (None, 0)]
            if failed and not code:
                code = failed[0]
                deadline = min(deadline or float("inf"), time.monotonic() + _AFTER_FAILURE_S)
            if deadline is not None and time.monotonic() > deadline:
                code = code or 124
                break
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code or next((p.returncode for p in processes if p.returncode), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code of the first rank that failed, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_taco.lab.shared_gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on the GPU")
    parser.add_argument("--timeout", type=float, help="seconds after which all ranks are killed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what Python runs, after --")
    args = parser.parse_args(argv)
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: at least 1")
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if not arguments:
        parser.error("nothing to run: give Python's arguments after --")
    return run_ranks(args.ranks, arguments, timeout_s=args.timeout)


if __name__ == "__main__":
    sys.exit(main())
