"""Set up experiment trackers: Weights & Biases (offline by default), TensorBoard, Trackio or none."""

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Any

from shared.errors import WorkshopError
from shared.paths import EXPERIMENTS, REPOSITORY

KEY_FILE = EXPERIMENTS / "wandb_key"
TRACKERS = ("wandb", "tensorboard", "trackio")


def check_trackers(report_to: str) -> list[str]:
    """Return a list with the requested tracker. The list is empty for `none`.

    Raises WorkshopError (exit code 2) if the tracker is unknown or not installed.
    """
    if report_to == "none":
        return []
    if report_to not in TRACKERS:
        remedy = f"choose one of {', '.join(TRACKERS)}, none"
        raise WorkshopError("--report_to", f"{report_to} is not a tracker of this workshop", remedy)
    if importlib.util.find_spec(report_to) is None:
        raise WorkshopError("--report_to", f"{report_to} is not installed", f"pip install {report_to}")
    return [report_to]


def prepare_trackers(args: Any, job_id: str) -> None:
    """Give each job its own folder and name. Weights & Biases stays offline unless WANDB_MODE sets another mode.

    args: TrainingArguments. This module does not import transformers, which would slow down tracking.py.
    """
    args.run_name = f"{args.run_name}-{job_id}"
    if "wandb" in args.report_to:
        folder = Path("wandb") / job_id
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_DIR"] = str(folder)
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_PROJECT", "distributed-fine-tuning")
    if "tensorboard" in args.report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", f"{args.output_dir}/tensorboard")


def close_trackers(args: Any, job_id: str, means: dict) -> None:
    """Write the callbacks' means into the summary of Weights & Biases. Print how to upload an offline run."""
    if "wandb" not in args.report_to or args.process_index != 0:
        return
    import wandb

    if wandb.run:
        wandb.run.summary.update({name: value for name, value in means.items() if value is not None})
    wandb.finish()
    if os.environ["WANDB_MODE"] == "offline":
        print(f"Upload where there is network: {upload_command(job_id)}")


def upload_command(job_id: str) -> str:
    """Return the command that uploads an offline run, to be run in the folder of the job.

    Unlike tracking.py, `wandb sync` does not read the key file.
    """
    if KEY_FILE.exists():
        return shlex.join(["python", os.path.relpath(REPOSITORY / "scripts" / "tracking.py"), job_id])
    return f"wandb sync wandb/{job_id}/wandb/offline-run-*"
