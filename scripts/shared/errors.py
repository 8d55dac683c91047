"""Exit codes, and the one way in which every script here tells of a mistake: an exception, one line, an exit code.

    0        done
    1        a training failed by itself: a traceback in the log, no memory left, a loss that is no number
    2        bad input: a flag, a variable, a file; found before anything is written, but for a model's weights, and
             what its first step tells
    3        environment: a GPU, a package, a network, a disk not as it must be; a rank that hangs; a failed
             preflight, knob audit
    4        no usable checkpoint to resume from
    75       stopped on a signal, with a checkpoint saved
    128 + N  ended by signal N

What is wrong is raised as a `WorkshopError` where it is found. Who goes on behind a mistake catches it (preflight.py,
`estimate_memory.py --compare`, job/end_of_job.py); for all others `run_program`, at the end of each script, makes the
line and the exit code of it. Scripts of several ranks end in `run_and_exit` of distributed/process_group.py, which
does the same and more. launch.py ends with the code of the rank that failed first, and so does job.sh (job_finish).
"""

import argparse
import difflib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

BAD_INPUT = 2
ENVIRONMENT = 3
NO_CHECKPOINT = 4
STOPPED = 75
# seconds in which rank 0 reports what every rank has found, and its launcher ends the others
SECONDS_FOR_RANK_0 = 10


class WorkshopError(Exception):
    """What ends a script: ``source: what; way_out``.

    source: the file, flag or variable at fault. what: what is wrong with it. way_out: what to do.
    code: the exit code, 2 to 4, or 1 for a training that failed by itself.
    """

    def __init__(self, source: object, what: str, way_out: str, code: int = BAD_INPUT):
        super().__init__(str(source), what, way_out, code)  # all of them, or it could not come from another process
        self.source = str(source)
        self.what = what
        self.way_out = way_out
        self.code = code

    def __str__(self) -> str:
        return f"{one_line(self.source)}: {one_line(self.what)}; {one_line(self.way_out)}"


def one_line(text: str) -> str:
    """The text without line ends and other control characters."""
    return "".join(each if each.isprintable() else " " for each in text)


def run_program(main: Callable[[], None]) -> None:
    """Run a script's `main`; what it raises ends the process with one line and the error's exit code."""
    try:
        main()
    except WorkshopError as error:
        report(error)
        sys.exit(error.code)


def report(error: WorkshopError, first: int = 0) -> None:
    """Print the error line on stderr, once per job.

    Usually every rank finds the same mistake: the `first` reports it, and its launcher then ends the others while they
    wait here. A mistake that only this rank sees (a file missing on one node) is reported late.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank != str(first):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save any more
        time.sleep(SECONDS_FOR_RANK_0)
    # bars are drawn on terminals only, and leave the cursor in the middle of their line
    line_of_its_own = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{line_of_its_own}error: {error}", file=sys.stderr, flush=True)


class LossyFile(io.FileIO):
    """What cannot be written is dropped: the terminal is gone, the reader of a pipe is, or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def survive_lost_output() -> None:
    """Let a long run outlive its stdout and stderr: a terminal that is closed, `| head`, a full disk."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):  # not one that a test has put there
            buffered = io.BufferedWriter(LossyFile(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffered, "utf-8", "backslashreplace", line_buffering=True))


def whole_number(variable: str, default: str | None = None) -> int:
    """The number in a variable, of a launcher most often. Raises WorkshopError (exit code 2) for anything else."""
    text = os.environ.get(variable) or default
    if text is None or not text.isdecimal():
        raise WorkshopError(variable, f"is {text!r}, not a whole number", "unset it, or give a whole number")
    return int(text)


def did_you_mean(word: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """The way out of an error about an unknown word: the nearest known one, or what else to do."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


class OneLineErrors(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, whose help opens with the purpose, and without abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs |= {"usage": argparse.SUPPRESS, "allow_abbrev": False}
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's ``argument --x/--y: reason`` into a WorkshopError."""
        match = re.match(r"argument ([^\s/:]+)\S*: (.*)", message, re.DOTALL)
        source, what = match.groups() if match else ("command line", message)
        raise WorkshopError(source, what, "see --help")
