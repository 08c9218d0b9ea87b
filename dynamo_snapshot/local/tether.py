"""``python -I -S tether.py PARENT_PID COMMAND …``: runs COMMAND in this process, ended with its parent.

Standard library only, and it becomes the command at once: the kernel, not a watcher process, ends the
child when the supervisor is killed. The setting survives ``execve`` and is not inherited by forks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the supervisor ended before its child began")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
