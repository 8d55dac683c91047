"""Watch a job, or a run without Slurm, in the terminal.

experiments/watch.sh 4711            # Ctrl-C ends only this view; the job continues
experiments/watch.sh                 # your newest job of these experiments in the queue, otherwise the newest log
experiments/watch.sh --once 4711     # print one view and end, as into a pipe

The view asks Slurm for the state of the job, and reads the ends of the job's log and of its loggers' files.
"""

import os
import signal
import sys
import textwrap
import time
from glob import escape

from reporting.job_view import newest_job, newest_log, view_job
from shared.errors import OneLineErrors, run_program
from shared.paths import EXPERIMENTS

REFRESH = 5  # seconds
WIDTH = 80  # columns


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when the reader of a pipe ends
    parser = OneLineErrors(description=__doc__)
    parser.add_argument("job", nargs="?", help="the number that sbatch printed, or local-... of a run without Slurm")
    parser.add_argument("--once", action="store_true", help="print one view and end")
    arguments = parser.parse_args()
    job = newest_job() if arguments.job is None else arguments.job
    try:
        watch(job, arguments.once or not sys.stdout.isatty())
    except KeyboardInterrupt:
        print()


def watch(job: str, once: bool) -> None:
    """Print the view once, or draw it again and again until the job has ended."""
    log = None
    clear, changes = "\033[2J", True
    while changes:
        log = log or newest_log(escape(job))
        lines, changes = view_job(job, log)
        lines = [part for line in lines for part in textwrap.wrap(line, WIDTH) or [""]]
        if once:
            print("\n".join(lines))
            return
        rows = os.get_terminal_size(sys.stdout.fileno()).lines
        if len(lines) >= rows > 2:
            lines[rows - 2 :] = [f"... {EXPERIMENTS}/watch.sh --once {job} prints all lines"]
        # Write over the old view instead of clearing it first, which would flicker: \033[H goes to the first line,
        # \033[K clears the rest of a line, and \033[J also all lines below
        print(f"{clear}\033[H" + "\033[K\n".join(lines) + "\033[J", flush=True)
        clear = ""
        time.sleep(REFRESH * changes)


if __name__ == "__main__":
    run_program(main)
