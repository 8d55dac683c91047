"""Experiment trackers: Weights & Biases (offline by default), TensorBoard, Trackio. None is needed to run.

    python scripts/tracking.py 4711      # upload job 4711's offline run; job.sh does this where WANDB_ONLINE=1

The key for the upload comes from `wandb login`, or from experiments/wandb_key (mode 0600, never in git).
"""

import argparse
import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from paths import EXPERIMENTS

KEY_FILE = EXPERIMENTS / "wandb_key"
TRACKERS = ("wandb", "tensorboard", "trackio")
UPLOAD_TIMEOUT = 300  # seconds; the job's GPUs wait meanwhile


def check_trackers(report_to: str) -> list[str]:
    """The tracker that is asked for, if any. Raises WorkshopError (exit code 2) if it is unknown or not installed."""
    if report_to == "none":
        return []
    if report_to not in TRACKERS:
        way_out = f"choose one of {', '.join(TRACKERS)}, none"
        raise WorkshopError("--report_to", f"{report_to} is no tracker of this workshop", way_out)
    if importlib.util.find_spec(report_to) is None:
        raise WorkshopError("--report_to", f"{report_to} is not installed", f"pip install {report_to}")
    return [report_to]


def prepare_trackers(args, job_id: str) -> None:
    """One folder and one name per job; Weights & Biases stays offline unless WANDB_MODE says otherwise."""
    args.run_name = f"{args.run_name}-{job_id}"
    if "wandb" in args.report_to:
        folder = Path("wandb") / job_id
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_DIR"] = str(folder)
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_PROJECT", "distributed-fine-tuning")
    if "tensorboard" in args.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{args.output_dir}/tensorboard")


def close_trackers(args, job_id: str, means: dict) -> None:
    """Put the callbacks' means into the run's summary, and say how to upload an offline run."""
    if "wandb" not in args.report_to or args.process_index != 0:
        return
    import wandb

    if wandb.run:
        wandb.run.summary.update({name: value for name, value in means.items() if value is not None})
    wandb.finish()
    if os.environ["WANDB_MODE"] == "offline":
        print(f"Upload where there is network: {upload_command(job_id)}")


def upload_command(job_id: str) -> str:
    """What to type in the folder of the job. `wandb sync` does not read the key file, `upload` does."""
    if KEY_FILE.exists():
        return shlex.join(["python", os.path.relpath(__file__), job_id])
    return f"wandb sync wandb/{job_id}/wandb/offline-run-*"


def upload(job_id: str) -> None:
    """Send the job's offline runs to Weights & Biases. The key goes through the environment, where ps shows none."""
    runs = sorted(Path("wandb", job_id, "wandb").glob("offline-run-*"))
    if not runs:
        raise WorkshopError(f"wandb/{job_id}", "holds no offline run", "run with REPORT_TO=wandb first")
    environment = dict(os.environ)
    if KEY_FILE.exists():
        if KEY_FILE.stat().st_mode & 0o077:  # the group or others may read it
            raise WorkshopError(KEY_FILE, "others may read the key", "chmod 600 it", ENVIRONMENT)
        environment["WANDB_API_KEY"] = KEY_FILE.read_text().strip()
    try:
        code = subprocess.run(["wandb", "sync", *map(str, runs)], env=environment, timeout=UPLOAD_TIMEOUT).returncode
        problem = f"ended with exit code {code}" if code else ""
    except OSError as error:
        problem = f"cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:  # without network it goes on trying
        problem = f"did not end within {UPLOAD_TIMEOUT} s"
    if problem:
        raise WorkshopError("wandb sync", problem, "run it on a login node", ENVIRONMENT)


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job_id", help="whose runs lie in wandb/JOB_ID of this folder")
    upload(parser.parse_args().job_id)


if __name__ == "__main__":
    run_program(main)
