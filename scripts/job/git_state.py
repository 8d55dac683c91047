"""The commit of the code, and whether files differ from it, as the run record has them.

    PYTHONPATH=scripts python -m job.git_state

job.sh asks before the training, and hands the answer on in JOB_GIT: a training that starts git itself is counted twice
in the memory log, up to git's exec.
"""

import argparse
import json
import os
import subprocess

from shared.errors import run_program
from shared.paths import REPOSITORY


def git_state() -> dict:
    """commit, and dirty: whether files differ from it; null where nobody knows."""
    if known := os.environ.get("JOB_GIT"):
        return json.loads(known)
    return ask_git()


def ask_git() -> dict:
    """As git_state, whatever JOB_GIT says: a job that another job has submitted inherits that one's."""
    frozen = REPOSITORY / "git.json"
    if frozen.exists():  # a snapshot of submit.sh
        return json.loads(frozen.read_text())

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # what an instructor and participants write is no change of the code
    others = [f":(exclude,top){folder}" for folder in ("experiments/site*", "exercises")]
    status = git("status", "--porcelain", "--", ":/", *others)
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(ask_git()))


if __name__ == "__main__":
    run_program(main)
