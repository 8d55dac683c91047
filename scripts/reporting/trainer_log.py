"""The Trainer's lines in a job's log, such as {'eval_loss': '7.38', 'eval_runtime': '0.09', 'epoch': '1'}."""

import ast
import re
from glob import escape
from pathlib import Path

ENTRY = re.compile(r"\{'[^{}\n]*\}")


def log_of(folder: Path, job_id: str) -> Path | None:
    """The job's log/<job-name>_<job id>.out, None without one or with several."""
    found = list(folder.glob(f"log/*_{escape(job_id)}.out"))
    return found[0] if len(found) == 1 else None


def entries(path: Path) -> list[dict[str, float]]:
    """All complete lines of the Trainer, in order; transformers prints the numbers as strings."""
    found = []
    for match in ENTRY.findall(path.read_text(encoding="utf-8", errors="replace")):
        try:
            found.append({name: float(value) for name, value in ast.literal_eval(match).items()})
        except (ValueError, SyntaxError, TypeError):
            continue  # another program's braces, or a line into which a second process wrote
    return found
