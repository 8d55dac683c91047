"""A job's log: its error line, the status in its summary, its last lines, the Trainer's lines such as
{'eval_loss': '7.38'}."""

import re
from collections.abc import Iterator
from glob import escape
from pathlib import Path

ENTRY = re.compile(r"\{('[^{}\n]*)\}")
PAIR = re.compile(r"'([^']*)': '?([^',]*)'?")
ERROR = re.compile(r"^error: .*", re.MULTILINE)
SUMMARY = re.compile(r"(?:^=+\n)?^status: (\w+) \(exit code (\d+)\)$", re.MULTILINE)  # that job.sh prints
LONGEST_ERROR = 500  # characters
LAST_LINES = 3


def log_of(folder: Path, job_id: str) -> Path | None:
    """The job's log/<job-name>_<job id>.out, None without one or with several."""
    found = list(folder.glob(f"log/*_{escape(job_id)}.out"))
    return found[0] if len(found) == 1 else None


def text_of(log: Path | None) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log and log.is_file() else ""


def error_in(log: Path | None) -> str:
    """The last line that begins with "error: ", which says why the job ended; empty without one, or without a log."""
    lines = ERROR.findall(text_of(log))
    return lines[-1][:LONGEST_ERROR].strip() if lines else ""


def summary_in(log: Path | None) -> tuple[str, str]:
    """Status and exit code in the job's summary; both empty if the log has none."""
    summaries = SUMMARY.findall(text_of(log))
    return summaries[-1] if summaries else ("", "")


def last_lines(log: Path | None) -> str:
    """The last lines of a log before the job's summary, in one line. They hold the error of a traceback."""
    text = text_of(log)
    ends = [summary.start() for summary in SUMMARY.finditer(text)]
    lines = [line.strip() for line in text[: ends[-1] if ends else None].splitlines()]
    return " / ".join(list(filter(None, lines))[-LAST_LINES:])[-LONGEST_ERROR:]


def entries(log: Path | None) -> Iterator[dict[str, float]]:
    """All complete lines of the Trainer, in order; transformers prints the numbers as strings."""
    for line in ENTRY.findall(text_of(log)):
        try:
            yield {name: float(value) for name, value in PAIR.findall(line)}
        except ValueError:
            continue  # another program's braces, or a line into which a second process wrote
