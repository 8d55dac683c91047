"""State of the code for the run record: the commit, and whether files that the run reads differ from it."""

import os
import re
from pathlib import Path

from job.on_node import output
from shared.paths import REPOSITORY

# An entry of `git status --porcelain=v2 -z` for a tracked file: its kind, fields without blanks, and its path. The
# pattern leaves out files that instructors and participants edit
TRACKED = re.compile(r"(?:1 (?:\S+ ){7}|2 (?:\S+ ){8}|u (?:\S+ ){9})(?!experiments/site|exercises/)")


def git_state() -> dict:
    """Return the fields `commit` and `dirty`.

    dirty: true if a file that the run reads differs from the commit: a tracked file, or a new file in the experiment's
    folder. It is null if git fails.
    """
    status = git_status()
    commit = re.match(r"# branch\.oid (\w+)\0", status)
    experiment = f"? {os.environ.get('EXPERIMENT', '')}/"  # git marks a new file, or a folder of new files, with "? "
    dirty = any(
        TRACKED.match(entry) or entry.startswith(experiment) or (entry[:2] == "? " and experiment.startswith(entry))
        for entry in status.split("\0")
    )
    return {"commit": commit and commit[1], "dirty": dirty if status else None}


def git_status() -> str:
    """Return the output of `git status`. The text is empty if git fails.

    Prefer a file with earlier output: submit.sh --snapshot writes one next to the code, and run_job.py
    writes one into the job's folder when the job begins.
    """
    for folder in (REPOSITORY, Path(os.environ.get("RUN_DIR", REPOSITORY))):
        if (written := folder / "git_status").exists():
            return written.read_text(errors="replace")
    command = ("git", "--no-optional-locks", "-C", str(REPOSITORY), "status", "--porcelain=v2", "--branch", "-z")
    return output(*command, seconds=20)
