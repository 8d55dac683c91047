"""Run a command that gets SIGTERM when the process that started it has ended, for whatever reason.

    python -P scripts/job/end_with_parent.py COMMAND ARGUMENTS...     # for job.sh

The command keeps the process id of this program.

This program imports no module of the workshop. It must not change the command's environment, so it has no PYTHONPATH.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    end_with_parent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals, and the command would inherit this
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"error: {sys.argv[1]}: {error.strerror}; check that it is installed and on PATH")


if __name__ == "__main__":
    main()
