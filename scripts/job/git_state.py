"""The commit of the code, and whether files that a run reads differ from it, for the run record.

    PYTHONPATH=scripts python -m job.git_state

job.sh asks before the training, and hands the answer on in JOB_GIT: a training that starts git itself is counted twice
in the memory log, up to git's exec.
"""

import argparse
import json
import os
import re
import subprocess

from shared.errors import run_program
from shared.paths import REPOSITORY

# kind of an entry of `git status --porcelain=v2 -z` -> number of fields before its path
FIELDS = {"1 ": 8, "2 ": 9, "u ": 10, "? ": 1}
UNTRACKED = "? "
WRITTEN_IN_CLASS = ("experiments/site", "exercises/")  # by the instructor and by participants


def git_state() -> dict:
    """Return commit, and dirty: true if a file that this run reads differs from it, null if git does not answer."""
    if known := os.environ.get("JOB_GIT"):
        return json.loads(known)
    return ask_git()


def ask_git() -> dict:
    """Return the state whatever JOB_GIT says, because a job inherits JOB_GIT from a job that submitted it."""
    frozen = REPOSITORY / "git_status"  # in a snapshot of submit.sh
    status = frozen.read_text(errors="replace") if frozen.exists() else git_status()
    commit = re.match(r"# branch\.oid (\w+)\0", status)
    dirty = any(map(is_read, status.split("\0"))) if status else None
    return {"commit": commit and commit[1], "dirty": dirty}


def git_status() -> str:
    """Return the output of `git status`, or an empty text if git fails."""
    command = ["git", "-C", str(REPOSITORY), "status", "--porcelain=v2", "--branch", "-z"]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def is_read(entry: str) -> bool:
    """Return True for a changed file that the run reads: a tracked one, or one in the experiment's folder."""
    kind = entry[:2]
    if kind not in FIELDS:  # the branch, or the former name of a file
        return False
    path = entry.split(" ", FIELDS[kind])[-1]
    if kind == UNTRACKED:  # git names a folder without tracked files once, with a slash at its end
        experiment = os.environ.get("EXPERIMENT", "") + "/"
        return path.startswith(experiment) or experiment.startswith(path)
    return not path.startswith(WRITTEN_IN_CLASS)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(ask_git()))


if __name__ == "__main__":
    run_program(main)
