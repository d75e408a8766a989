"""What a rank is before it is a rank: enters a namespace, ties its life to the launcher's, execs.

Run as a file, ``python -I -S enter.py PARENT NETNS|- COMMAND...``; needs the standard library only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command. PARENT is the launcher's process id, NETNS a path, - for none."""
    parent, netns, *command = sys.argv[1:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit("the launcher is gone")
    if netns != "-":
        file = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
        os.setns(file, os.CLONE_NEWNET)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
