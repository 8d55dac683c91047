"""The commit of the code, and whether files that a run reads differ from it, for the run record."""

import os
import re
import subprocess
from pathlib import Path

from shared.paths import REPOSITORY

# kind of an entry of `git status --porcelain=v2 -z` -> number of fields before its path
FIELDS = {"1 ": 8, "2 ": 9, "u ": 10, "? ": 1}
WRITTEN_IN_CLASS = ("experiments/site", "exercises/")  # by the instructor and by participants


def git_state() -> dict:
    """Return commit, and dirty: true if a file that this run reads differs from it, null if git does not answer."""
    status = git_status()
    commit = re.match(r"# branch\.oid (\w+)\0", status)
    dirty = any(map(is_run_input, status.split("\0"))) if status else None
    return {"commit": commit and commit[1], "dirty": dirty}


def git_status() -> str:
    """Return the output of `git status`, or an empty text if git fails.

    submit.sh --snapshot has written it next to the code, and job.sh into the job's folder when the job began.
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
    """Return True for a changed file that the run reads: a tracked one, or one in the experiment's folder."""
    kind = entry[:2]
    if kind not in FIELDS:  # the branch, or the former name of a file
        return False
    path = entry.split(" ", FIELDS[kind])[-1]
    if kind == "? ":  # untracked: git names a folder without tracked files once, with a slash at its end
        experiment = os.environ.get("EXPERIMENT", "") + "/"
        return path.startswith(experiment) or experiment.startswith(path)
    return not path.startswith(WRITTEN_IN_CLASS)
