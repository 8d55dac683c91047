"""Checks of preflight.py that start experiments: dry runs, rows of gpu_check.py, and three Slurm jobs."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checks.machine import Lines, last_line, run_command
from config import KNOBS
from job.end_of_job import queued_jobs
from job.variables import OF_A_JOB, OF_A_RANK
from shared.paths import EXPERIMENTS, REPOSITORY, SAMPLE

TINY = {"MODEL_NAME": "tiny-bloom", "TRAIN_SIZE": 8, "EVAL_SIZE": 4, "MAX_LENGTH": 256, "SAMPLES_PER_GPU": 8}
TINY |= {"BATCH_SIZE": 2, "GRAD_ACC": 1, "NUM_EPOCHS": 1, "EM_F1": False, "SAVE_STRATEGY": "no", "REPORT_TO": "none"}
JOBS = ("baseline", "deepspeed-multi-node/2_nodes", "deepspeed-native-launch/zero3_offload")
ROWS = ("one_rank", "ddp", "zero2", "full_shard")  # the rows of gpu_check.py --ranks 2 that preflight trains
KEPT = "kept"  # marker file: preflight keeps its folder, because a failed check names a log in it
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT")


def dry_runs(caller: dict[str, str]) -> Lines:
    """Check the dry runs of three experiments.

    caller: the environment before the site was loaded, because each experiment loads the site itself.
    """
    # Drop Slurm's variables: in a Slurm job, DRY_RUN has no effect, and the experiment would train
    variables = {name: value for name, value in caller.items() if not name.startswith("SLURM_")} | {"DRY_RUN": "1"}
    for job in JOBS:
        (script,) = (EXPERIMENTS / job).glob("*.slurm")
        done, output = run_command("bash", script.name, env=variables, cwd=script.parent, timeout=300)
        if not done:
            yield "fail", "experiments", f"{job}: {last_line(output)}"
            return
    yield "ok", "experiments", f"{', '.join(JOBS)} would run"


def tiny_jobs(folder: Path, timeout: int) -> Lines:
    """Train some rows of gpu_check.py with two ranks on this machine. timeout: seconds per training."""
    import torch

    path = folder / "gpu_check.json"
    command = [sys.executable, REPOSITORY / "scripts/gpu_check.py", "--output", folder, "--timeout", timeout]
    command += ["--ranks", "2", *([] if torch.cuda.is_available() else ["--cpu"])]
    _, output = run_command(*command, "--rows", *ROWS, cwd=folder, timeout=None)
    results = json.loads(path.read_text())["rows"] if path.exists() else {}
    for row in ROWS:
        result = results.get(row, {"status": "failed", "reason": last_line(output)})
        if result["status"] == "completed":
            yield "ok", row, f"eval loss {result['eval_loss']:.2f}, {result['seconds']:.0f} s"
        else:
            (folder / KEPT).touch()
            yield "fail", row, result["reason"]


def tiny_variables(folder: Path, variables: dict, gpu: bool) -> dict[str, str]:
    """Replace the caller's settings in `variables` by those of a tiny-bloom training."""
    tiny = TINY | {"DATASET": SAMPLE} | ({} if gpu else {"FP16": False})
    return drop_settings(variables, folder) | {name: str(value) for name, value in tiny.items()}


def drop_settings(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Drop the caller's knobs, launcher and job from `variables`, and set the data set cache to `folder`."""
    dropped = {knob.variable for knob in KNOBS} | OF_A_JOB.keys() | OF_A_RANK.keys()
    kept = {k: v for k, v in variables.items() if k not in dropped and (k[:6] != "SLURM_" or k == "SLURM_CONF")}
    return kept | {"HF_DATASETS_CACHE": str(folder / "datasets")}


def run_training(
    job_id: str,
    words: list[str],
    variables: dict[str, str],
    folder: Path,
    timeout: int,
    disturb: Callable[[Any, Path], object] | None = None,
) -> dict:
    """Run a training in `folder` and return its run record. For a failed run, the reason in the record names the log.

    disturb: called with the process (psutil) and its log when the process has started. torchrun starts each rank in a
    new session, so the function kills all descendants at the end.
    """
    import psutil

    path, log = folder / "results" / f"{job_id}.json", folder / f"{job_id}.log"
    if "--resume_from_checkpoint" not in words:  # train.py does not overwrite the record of an earlier call
        path.unlink(missing_ok=True)
        shutil.rmtree(folder / "output" / job_id, ignore_errors=True)
    with log.open("w") as file:
        environment = variables | {"JOB_ID": job_id}
        process = psutil.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            if disturb:
                disturb(process, log)
            done = process.wait(timeout) == 0
        except psutil.TimeoutExpired:
            file.write(f"\nerror: time: still running after {timeout} s; read the log above, or raise --timeout\n")
            done = False
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
    record = json.loads(path.read_text()) if path.exists() else {}
    if not done:
        record["status"] = "oom" if record.get("status") == "oom" else "failed"
        record["reason"] = f"{last_line(log.read_text(errors='replace'))}; read {log}"
    return record


def slurm_jobs(folder: Path, timeout: int, caller: dict[str, str]) -> Lines:
    """Check three Slurm jobs, which run one after another as a chain. caller: as in `dry_runs`."""
    if not shutil.which("sbatch"):
        yield "fail", "Slurm jobs", "there is no sbatch on PATH", "use a login node, or leave --submit out"
        return
    copy_repository(folder)
    variables = tiny_variables(folder, caller, gpu=os.environ.get("REQUIRE_GPU") != "0")
    variables |= {"SBATCH_TIMELIMIT": str(timeout // 60 + 1)}
    submit = folder / "experiments" / "submit.sh"
    try:
        done, output = run_command("bash", submit, "--chain", "all", env=variables, cwd=folder, timeout=120)
        if not done:
            yield "fail", "submit.sh", last_line(output)
        deadline = time.monotonic() + timeout
        for job_id, name in re.findall(r"^(\d+)  experiments/(.*)/", output, re.MULTILINE):
            state, reason, log = wait_for_job(job_id, deadline)
            if state == "COMPLETED":
                yield "ok", name, state
            elif log.is_file():
                output = last_line(log.read_text(errors="replace"))
                (folder / KEPT).touch()
                yield "fail", name, f"{state} ({reason}); {output}", f"read {log}"
            else:
                remedy = f"no log after {timeout} s; raise --timeout if the job is waiting for nodes"
                yield "fail", name, f"{state} ({reason})", remedy
    finally:
        # Find the jobs by their folder, because a signal may come before submit.sh has printed them
        jobs = (queued_jobs() or {}).items()
        own = [job_id for job_id, job in jobs if job["folder"].startswith(f"{folder.resolve()}/")]
        run_command("scancel", *own)


def copy_repository(folder: Path) -> None:
    """Copy what the three jobs read, so that their results do not land in the experiments' folders."""
    ignored = shutil.ignore_patterns("__pycache__", "results", "output", "?pu_memory", "profile", "*.out", "wandb*")
    experiments = [f"experiments/{job}" for job in JOBS]
    for name in ("scripts", "ds_configs", "fsdp_configs", "data", "experiments/sites", *experiments):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)  # it holds the version, which run records contain
    for file in EXPERIMENTS.iterdir():
        if file.is_file():
            shutil.copy(file, folder / "experiments")
    if (REPOSITORY / ".venv").exists():
        (folder / ".venv").symlink_to(REPOSITORY / ".venv")


def wait_for_job(job_id: str, deadline: float) -> tuple[str, str, Path]:
    """Wait until a job has ended or the time is up. Return its state, Slurm's reason and the path of its log.

    `sbatch --wait` is not used because it can hang.
    """
    while True:
        _, output = run_command("scontrol", "show", "job", job_id)
        fields = dict(re.findall(r"(JobState|Reason)=(\S+)", output))
        fields |= dict(re.findall(r"^ +(StdOut)=(.*)$", output, re.MULTILINE))
        state = fields.get("JobState", "UNKNOWN")
        if state not in UNFINISHED or time.monotonic() > deadline:
            return state, fields.get("Reason", last_line(output)), Path(fields.get("StdOut", "none"))
        time.sleep(2)
