"""Upload the offline runs of a job to Weights & Biases.

    python scripts/tracking.py 4711      # the runs of job 4711; run_job.py does this if WANDB_ONLINE=1

The key for the upload comes from `wandb login`, or from experiments/wandb_key (mode 0600, never in git).
"""

import os
import subprocess
from pathlib import Path

from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from shared.tracker_setup import KEY_FILE

UPLOAD_TIMEOUT = 300  # seconds; the job's GPUs are idle during the upload


def upload(job_id: str) -> None:
    """Upload the job's offline runs. The key is passed in the environment, because ps would show an argument."""
    runs = sorted(Path("wandb", job_id, "wandb").glob("offline-run-*"))
    if not runs:
        raise WorkshopError(f"wandb/{job_id}", "contains no offline run", "run with REPORT_TO=wandb first")
    environment = dict(os.environ)
    if KEY_FILE.exists():
        if KEY_FILE.stat().st_mode & 0o077:  # readable for the group or for others
            raise WorkshopError(KEY_FILE, "others may read the key", "chmod 600 it", ENVIRONMENT)
        environment["WANDB_API_KEY"] = KEY_FILE.read_text().strip()
    try:
        code = subprocess.run(["wandb", "sync", *map(str, runs)], env=environment, timeout=UPLOAD_TIMEOUT).returncode
        problem = f"ended with exit code {code}" if code else ""
    except OSError as error:
        problem = f"cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:  # Without a network, `wandb sync` retries without end.
        problem = f"did not end within {UPLOAD_TIMEOUT} s"
    if problem:
        raise WorkshopError("wandb sync", problem, "run it on a login node", ENVIRONMENT)


def main() -> None:
    parser = OneLineErrors(description=__doc__)
    parser.add_argument("job_id", help="the job; its runs are in the folder wandb/JOB_ID")
    upload(parser.parse_args().job_id)


if __name__ == "__main__":
    run_program(main)
