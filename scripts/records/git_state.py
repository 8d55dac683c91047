"""State of the code for the run record: the commit, and whether files that the run reads differ from it."""

import os
import re
import subprocess
from pathlib import Path

from shared.paths import REPOSITORY

# Kind of an entry of `git status --porcelain=v2 -z` -> number of fields before the path
FIELDS = {"1 ": 8, "2 ": 9, "u ": 10, "? ": 1}
WRITTEN_IN_CLASS = ("experiments/site", "exercises/")  # instructors and participants edit these files


def git_state() -> dict:
    """Return the fields `commit` and `dirty`.

    dirty: true if a file that the run reads differs from the commit, null if git fails.
    """
    status = git_status()
    commit = re.match(r"# branch\.oid (\w+)\0", status)
    dirty = any(map(is_run_input, status.split("\0"))) if status else None
    return {"commit": commit and commit[1], "dirty": dirty}


def git_status() -> str:
    """Return the output of `git status`. The text is empty if git fails.

    Prefer a file with earlier output: submit.sh --snapshot writes one next to the code, and job.sh
    writes one into the job's folder when the job begins.
    """
    for folder in (REPOSITORY, Path(os.environ.get("RUN_DIR", REPOSITORY))):
        if (written := folder / "git_status").exists():
            return written.read_text(errors="replace")
    command = ["git", "-C", str(REPOSITORY), "status", "--porcelain=v2", "--branch", "-z"]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def is_run_input(entry: str) -> bool:
    """Return True if an entry is a file that the run reads: a tracked file, or one in the experiment's folder."""
    kind = entry[:2]
    if kind not in FIELDS:  # an entry for the branch, or the old name of a renamed file
        return False
    path = entry.split(" ", FIELDS[kind])[-1]
    if kind == "? ":  # untracked; git lists a folder without tracked files as one entry that ends in a slash
        experiment = os.environ.get("EXPERIMENT", "") + "/"
        return path.startswith(experiment) or experiment.startswith(path)
    return not path.startswith(WRITTEN_IN_CLASS)
