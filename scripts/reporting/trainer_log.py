"""Read a job's log: its error line, its summary, its progress, its last lines, and the Trainer's lines.

A line of the Trainer looks like this: {'eval_loss': '7.38', 'epoch': '2.0'}
"""

import re
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from shared.files import read_file

ENTRY = re.compile(r"\{('[^{}\n]*)\}")
PAIR = re.compile(r"'([^']*)': '?([^',]*)'?")
ERROR = re.compile(r"^error: .*", re.MULTILINE)
# The line of an exception is the first one after `Traceback` that is not indented. PyTorch puts the rank before each.
# A syntax error in the program itself has no line `Traceback`
EXCEPTION = re.compile(
    r"^(\[rank\d+\]: |)Traceback \(.*\n(?:(?!\1\S).*\n)*\1(\S.*)|^((?:Syntax|Indentation)Error: .*)", re.MULTILINE
)
ATTEMPT = re.compile(r"^(?=job \S+ of )", re.MULTILINE)  # the first line that run_job.py prints in each attempt
STEP = re.compile(r"^step (\d{1,9}) of (\d{1,9}) \(\d+ %\) after (\d{1,9}) s", re.MULTILINE)
RESUMED = re.compile(r"^resuming from step (\d{1,9})", re.MULTILINE)
STOPPED = re.compile(r"^stopped by \w+ at step (\d{1,9}) of (\d{1,9})", re.MULTILINE)
SUMMARY = re.compile(r"(?:^=+\n)?^status: (\w+) \(exit code (\d+)\)$", re.MULTILINE)  # printed by end_of_job.py
LONGEST_ERROR = 500  # characters
END = 2**18  # bytes; 30 ranks that print a traceback each fit
LAST_LINES = 3


def find_log(folder: Path, job_id: str) -> Path | None:
    """Return the job's log/<job-name>_<job id>.out, or None if there is not exactly one such file."""
    found = list(folder.glob(f"log/*_{escape(job_id)}.out"))
    return found[0] if len(found) == 1 else None


def read_problem(log: Path | None) -> str:
    """Return the reason why a log cannot be read. It is empty if the log is readable, or if there is none."""
    try:
        if log:
            read_file(log, 0)
    except OSError as error:
        return error.strerror or "cannot be read"
    return ""


def read_log(log: Path | None, last: int | None = None) -> str:
    """Return a log or its last bytes. The text is empty if the log cannot be read: `read_problem` gives the reason."""
    try:
        return read_file(log, last).decode("utf-8", errors="replace") if log else ""
    except OSError:
        return ""


def log_end(log: Path | None) -> str:
    """Return the last attempt in the last part of a log, which is quick to read even if the log is huge."""
    return ATTEMPT.split(read_log(log, END))[-1]


def last_error(text: str) -> str:
    """Return the last line that begins with "error: ". It is the reason why the job ended."""
    lines = ERROR.findall(text)
    return lines[-1][:LONGEST_ERROR].strip() if lines else ""


def last_exception(text: str) -> str:
    """Return the line of the last exception in a log, such as "ValueError: no such mode". It is empty without one."""
    lines = [raised or syntax_error for _, raised, syntax_error in EXCEPTION.findall(text)]
    return lines[-1][:LONGEST_ERROR] if lines else ""


def last_values(text: str, name: str, count: int = 1) -> list[str]:
    """Return the last values that the Trainer has logged under a name, the newest at the end."""
    return re.findall(rf"'{name}': '([^']*)'", text)[-count:]


def last_step(text: str) -> str:
    """Return the last step and the last training loss, such as "step 96 of 192, loss 7.012"; empty before the first."""
    found = [f"step {step} of {steps}" for step, steps, _ in STEP.findall(text)[-1:]]
    return ", ".join(found + [f"loss {loss}" for loss in last_values(text, "loss")])


def done_percent(text: str) -> int:
    """Return how much of the training is done, from the last line "step N of M". It is 0 without one."""
    steps = STEP.findall(text)
    return 100 * int(steps[-1][0]) // max(1, int(steps[-1][1])) if steps else 0


def progress(text: str, runs: bool) -> str:
    """Return the progress, such as "40 of 200 (20 %), 2 steps/s, about 1:20 min left"; empty before the first step.

    The rate does not count the time before the first line "step N of M". runs: the time left is shown.
    """
    resumed = int((RESUMED.findall(text) or [0])[-1])
    lines = [(resumed, 0, 0), *(tuple(map(int, line)) for line in STEP.findall(text))]
    (first, _, began), (step, of, seconds) = lines[len(lines) > 2], lines[-1]
    stopped = STOPPED.findall(text)
    done, of = map(int, stopped[-1]) if stopped else (step, of)
    if not of:
        return ""
    if read_summary(text)[0] == "completed":
        done = of
    shown = f"{done} of {of} ({100 * done // of} %)"
    if step <= first or seconds <= began:
        return shown
    rate = (step - first) / (seconds - began)
    minutes, seconds = divmod(int((of - step) / rate), 60)
    left = f", about {minutes}:{seconds:02} min left" if runs and not stopped and step < of else ""
    return f"{shown}, {rate:.3g} steps/s{left}"


def read_summary(text: str) -> tuple[str, str]:
    """Return status and exit code from the job's summary. Both are empty if the log has no summary."""
    summaries = SUMMARY.findall(text)
    return summaries[-1] if summaries else ("", "")


def last_lines(text: str) -> str:
    """Return the exception in a log. Without one, join the last lines before the job's summary."""
    ends = [summary.start() for summary in SUMMARY.finditer(text)]
    lines = [line.strip() for line in text[: ends[-1] if ends else None].splitlines()]
    return last_exception(text) or " / ".join(list(filter(None, lines))[-LAST_LINES:])[-LONGEST_ERROR:]


def entries(log: Path | None) -> Iterator[dict[str, float]]:
    """Yield the numbers of each complete line of the Trainer, in order. transformers prints numbers as strings."""
    for line in ENTRY.findall(read_log(log)):
        try:
            yield {name: float(value) for name, value in PAIR.findall(line)}
        except ValueError:
            continue  # a line of another program, or one that two processes wrote at the same time
