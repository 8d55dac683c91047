"""Exit codes and error reporting: every script reports an error as one line on stderr and an exit code.

    0        done
    1        the training itself failed: a traceback in the log, out of memory, a loss that is not finite
    2        bad input: a flag, a variable or a file. Most are found before anything is written; problems with a model's
             weights or in its first step are found later
    3        environment: a problem with a GPU, a package, the network or a disk; a hanging rank; a failed preflight
             or knob audit
    4        no usable checkpoint to resume from
    75       stopped by a signal, after a checkpoint was saved
    128 + N  ended by signal N

Code that finds a problem raises `WorkshopError`. Code that continues after an error catches WorkshopError itself
(preflight.py, `estimate_memory.py --compare`, job/end_of_job.py). Otherwise `run_program`, which runs each script's
`main`, prints the line and sets the exit code. Scripts with several ranks use `run_and_exit` of
distributed/process_group.py instead. launch.py and run_job.py end with the code of the rank that failed first.
"""

import argparse
import contextlib
import difflib
import errno
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

BAD_INPUT = 2
ENVIRONMENT = 3
NO_CHECKPOINT = 4
STOPPED = 75
STOPPING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
# Seconds for which the other ranks wait while rank 0 reports an error and its launcher ends them
SECONDS_FOR_RANK_0 = 10
# A half of a character (a lone surrogate), which UTF-8 cannot encode. JSON can have one as an escape such as \ud83d. In
# a flag, Python reads bytes that are not UTF-8 as such halves
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
REMEDIES = {  # what to do about an error of the system
    None: "free disk space or quota, or allow larger files (ulimit -f)",  # libraries give no number for a failed write
    errno.ENOSPC: "free disk space or quota",
    errno.EDQUOT: "free disk space or quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EMFILE: "allow more open files (ulimit -n)",
}


class WorkshopError(Exception):
    """An error that ends a script with one line: ``source: what; remedy``.

    source: the file, flag or variable that is wrong. what: the problem. remedy: what the user can do.
    code: the exit code, 2 to 4, or 1 if the training itself failed.
    """

    def __init__(self, source: object, what: str, remedy: str, code: int = BAD_INPUT):
        super().__init__(str(source), what, remedy, code)  # pass all arguments, so that the exception can be pickled
        self.source = str(source)
        self.what = what
        self.remedy = remedy
        self.code = code

    def __str__(self) -> str:
        return f"{one_line(self.source)}: {one_line(self.what)}; {one_line(self.remedy)}"


def one_line(text: str) -> str:
    """Replace line ends and other control characters in a text by blanks."""
    return "".join(each if each.isprintable() else " " for each in text)


def join_first(texts: Collection[str], between: str = ", ", most: int = 5) -> str:
    """Join the first texts, and say how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(list(texts)[:most]) + more


def run_program(main: Callable[[], None]) -> None:
    """Run a script's `main`. A WorkshopError ends the process with one line and the error's exit code."""
    try:
        main()
    except WorkshopError as error:
        report(error)
        sys.exit(error.code)


def report(error: WorkshopError, first: int = 0) -> None:
    """Print the error line on stderr, once per job, just before this process ends.

    Usually every rank finds the same error. The rank `first` reports it, and the launcher then ends the other ranks,
    which wait here. An error that only this rank finds, such as a file missing on one node, is reported after the wait.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank != str(first):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save
        time.sleep(SECONDS_FOR_RANK_0)
    # A progress bar, which is drawn only on a terminal, leaves the cursor in the middle of a line
    line_of_its_own = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{line_of_its_own}error: {error}", file=sys.stderr, flush=True)
    note_end(error.code, f"error: {error}")


def note_end(code: int, text: str, time_ns: int | None = None) -> None:
    """In a job, note for job/end_of_job.py that a process ends. Which process of a job ended first is its reason.

    text: the name of the process, or its error line. time_ns: when it ended, by default now.
    """
    lost = contextlib.suppress(KeyError, OSError)  # there is no job, or its disk is full
    with lost, Path(os.environ["RUN_DIR"], "exit_codes").open("a", errors="backslashreplace") as file:
        file.write(f"{time_ns or time.time_ns()} {code} {text}\n")


class LossyFile(io.FileIO):
    """A file that drops output that it cannot write: the terminal or pipe is closed, or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def survive_lost_output() -> None:
    """Keep a run alive when it can no longer write to stdout or stderr: closed terminal, `| head`, full disk."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):  # skip a stream that a test has replaced
            buffered = io.BufferedWriter(LossyFile(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffered, "utf-8", "backslashreplace", line_buffering=True))


def whole_number(variable: str, default: str | None = None) -> int:
    """Return the whole number in an environment variable. Raises WorkshopError (exit code 2) for any other value."""
    text = os.environ.get(variable) or default
    if text is None or not text.isdecimal():
        raise WorkshopError(variable, f"is {text!r}, not a whole number", "unset it, or give a whole number")
    return int(text)


def error_number(error: BaseException) -> int | None:
    """Return the system's number of an error. Libraries in Rust only print it: "File too large (os error 27)"."""
    printed = re.search(r"\(os error (\d+)\)", str(error))
    return int(printed[1]) if printed else getattr(error, "errno", None)


def remedy_for_write(error: BaseException) -> str:
    """Return what to do about an exception of a write."""
    return REMEDIES.get(error_number(error), "check the path and its permissions")


def cannot_be_written(path: object, error: OSError) -> WorkshopError:
    return WorkshopError(path, f"cannot be written ({error.strerror})", remedy_for_write(error), ENVIRONMENT)


def did_you_mean(word: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Return advice for an unknown word: the most similar known word, or `otherwise` if none is similar."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


class OneLineErrors(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors and without abbreviated flags. The help begins with the description."""

    def __init__(self, *args: Any, **kwargs: Any):
        # The formatter keeps the lines of the description
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs
        kwargs |= {"usage": argparse.SUPPRESS, "allow_abbrev": False}
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's ``argument --x/--y: reason`` into a WorkshopError."""
        match = re.match(r"argument ([^\s/:]+)\S*: (.*)", message, re.DOTALL)
        source, what = match.groups() if match else ("command line", message)
        raise WorkshopError(source, what, "see --help")
