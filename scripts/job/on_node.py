"""Wait for a job's command on one node, pass signals on to it, and stop the memory loggers next to it.

    exec python -P scripts/job/on_node.py node1 "rank 0" 4711 psrecord=4712 nvidia-smi=4713     # for job.sh

The numbers are process ids. job.sh starts the processes, and this program then replaces its shell. So the processes are
children of this program. The exit code is the command's, or 128 + N if signal N ended the command.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    host, role, command, *loggers = sys.argv[1:]
    signals: list[int] = []
    forward_signals(int(command), signals)
    code = wait_for_exit_code(int(command))
    if code:  # srun returns the highest code of all nodes, which often comes from a command that srun ended
        note("exit_codes", f"{time.time_ns()} {code} {role} on {host}")
    for logger in loggers:
        program, _, pid = logger.partition("=")
        if not stop(program, int(pid)) and not signals:
            note(f"missing_{host}", f"{program} on {host} ended before the training: its log is not complete")
    sys.exit(code)


def forward_signals(command: int, signals: list[int]) -> None:
    """Install handlers that forward signals to the command and add them to `signals`.

    SIGUSR1 is sent as SIGUSR1. Every other signal is sent as SIGTERM, because a background process may ignore SIGINT.
    """

    def pass_on(number: int, frame: object) -> None:
        signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)

    for number in SIGNALS:
        # Keep SIGHUP ignored under nohup
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)


def wait_for_exit_code(command: int) -> int:
    """Wait for the command and return its exit code as a shell reports it."""
    _, status = os.waitpid(command, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def stop(program: str, pid: int) -> bool:
    """Stop a logger. Return False if it ended before the command. psrecord may end together with the command."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGTERM)
    return not ended or (program == "psrecord" and status == 0)


def note(name: str, line: str) -> None:
    """Append a line for end_of_job.py to a file in the job's folder. On a full disk the line is lost."""
    with contextlib.suppress(OSError), Path(os.environ["RUN_DIR"], name).open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    main()
