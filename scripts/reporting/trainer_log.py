"""Read a job's log: its error line, its summary, its last lines, and the Trainer's lines.

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
STEP = re.compile(r"^step (\d{1,9}) of (\d{1,9}) \(\d+ %\) after ", re.MULTILINE)
LOSS = re.compile(r"\{'loss': '([^']*)'")
SUMMARY = re.compile(r"(?:^=+\n)?^status: (\w+) \(exit code (\d+)\)$", re.MULTILINE)  # printed by job.sh
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
        return f"{log}: {error.strerror}"
    return ""


def log_end(log: Path | None, last: int | None = END) -> str:
    """Return the last bytes of a log, which are quick to read even if the log is huge. None returns the whole log.

    The text is empty if the log cannot be read. `read_problem` gives the reason.
    """
    try:
        return read_file(log, last).decode("utf-8", errors="replace") if log else ""
    except OSError:
        return ""


def progress(log: Path | None) -> int:
    """Return how much of the training is done, in percent, from the last line "step N of M". It is 0 without one."""
    steps = STEP.findall(log_end(log))
    return 100 * int(steps[-1][0]) // max(1, int(steps[-1][1])) if steps else 0


def last_error(log: Path | None) -> str:
    """Return the last line that begins with "error: ". It is the reason why the job ended."""
    lines = ERROR.findall(log_end(log))
    return lines[-1][:LONGEST_ERROR].strip() if lines else ""


def last_step(log: Path | None) -> str:
    """Return the last step and the last training loss, such as "step 96 of 192, loss 7.012"; empty before the first."""
    text = log_end(log)
    found = [f"step {step} of {steps}" for step, steps in STEP.findall(text)[-1:]]
    return ", ".join(found + [f"loss {loss}" for loss in LOSS.findall(text)[-1:]])


def read_summary(log: Path | None) -> tuple[str, str]:
    """Return status and exit code from the job's summary. Both are empty if the log has no summary."""
    summaries = SUMMARY.findall(log_end(log))
    return summaries[-1] if summaries else ("", "")


def last_lines(log: Path | None) -> str:
    """Join the last lines of a log before the job's summary. A traceback ends with its error there."""
    text = log_end(log)
    ends = [summary.start() for summary in SUMMARY.finditer(text)]
    lines = [line.strip() for line in text[: ends[-1] if ends else None].splitlines()]
    return " / ".join(list(filter(None, lines))[-LAST_LINES:])[-LONGEST_ERROR:]


def entries(log: Path | None) -> Iterator[dict[str, float]]:
    """Yield the numbers of each complete line of the Trainer, in order. transformers prints numbers as strings."""
    for line in ENTRY.findall(log_end(log, None)):
        try:
            yield {name: float(value) for name, value in PAIR.findall(line)}
        except ValueError:
            continue  # a line of another program, or one that two processes wrote at the same time
