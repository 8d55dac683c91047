"""A job's log: its error line, and the Trainer's lines such as {'eval_loss': '7.38', 'epoch': '1'}."""

import re
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from reporting.files import text_blocks

ENTRY = re.compile(r"\{('[^{}\n]*)\}")
PAIR = re.compile(r"'([^']*)': '?([^',]*)'?")
ERROR = re.compile(r"^error: .*", re.MULTILINE)
LONGEST_ERROR = 500  # characters


def log_of(folder: Path, job_id: str) -> Path | None:
    """The job's log/<job-name>_<job id>.out, None without one or with several."""
    found = list(folder.glob(f"log/*_{escape(job_id)}.out"))
    return found[0] if len(found) == 1 else None


def error_in(path: Path) -> str:
    """The last line that begins with "error: ", which says why the job ended; empty without one, or without a log."""
    found = ""
    try:
        for text in text_blocks(path):
            for line in ERROR.findall(text):
                found = line[:LONGEST_ERROR].strip()
    except OSError:
        return ""
    return found


def entries(path: Path) -> Iterator[dict[str, float]]:
    """All complete lines of the Trainer, in order; transformers prints the numbers as strings. OSError."""
    for text in text_blocks(path):
        for line in ENTRY.findall(text):
            try:
                yield {name: float(value) for name, value in PAIR.findall(line)}
            except ValueError:
                continue  # another program's braces, or a line into which a second process wrote
