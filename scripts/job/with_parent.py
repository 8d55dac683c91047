"""Run a command that is told to end, by SIGTERM, when the process that started it is gone, however that ended.

    python -P scripts/job/with_parent.py COMMAND ARGUMENTS...     # for job.sh

The command keeps the process id of this program.

Nothing of the workshop is imported: the command gets the environment as it is, so this has no PYTHONPATH to find it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    end_with_parent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"error: {sys.argv[1]}: {error.strerror}; see that it is installed, and on PATH")


if __name__ == "__main__":
    main()
