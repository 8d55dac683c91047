"""Facts about a run's environment for its record: job id, experiment, hardware and versions."""

import json
import math
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

from distributed.collectives import ranks_per_gpu
from records.schema import check_job_id
from shared.nvml import power_limit_w
from shared.paths import REPOSITORY, workshop_version

PACKAGES = ["torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers"]


def new_job_id() -> str:
    """Return the job's id: JOB_ID, Slurm's job id, or local-<time>-<pid>, which differs between ranks.

    Raises WorkshopError (exit code 2) for an id that cannot be part of a file name.
    """
    local = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    job_id = os.environ.get("JOB_ID") or os.environ.get("SLURM_JOB_ID") or local
    check_job_id(job_id)
    return job_id


def experiment_path() -> str:
    """Return the working directory relative to the repository, or only its name if it is outside."""
    if "EXPERIMENT" in os.environ:  # set by job.sh, because the job may run a snapshot of the repository
        return os.environ["EXPERIMENT"]
    here = Path.cwd()
    return str(here.relative_to(REPOSITORY)) if here.is_relative_to(REPOSITORY) else here.name


def strip_repository(value: object) -> object:
    """Make an absolute path in the repository relative to it. Return any other value unchanged.

    A record should not contain absolute paths of the machine.
    """
    if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_relative_to(REPOSITORY):
        return str(Path(value).relative_to(REPOSITORY))
    return value


def hardware(world_size: int) -> dict:
    """Return the record's field `hardware`: name and number of GPUs and CPUs, and limits of a GPU."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "gpu": gpu.name if gpu else None,
        "gpus": math.ceil(world_size / ranks_per_gpu()) if gpu else 0,
        "gpu_memory_mib": gpu.total_memory // 2**20 if gpu else None,
        "gpu_power_limit_w": power_limit_w(),
        "cpu": names[0].split(":")[1].strip() if names else platform.machine(),
        "cpus": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Return the versions of this workshop, Python and the packages."""
    own = {"workshop": workshop_version(), "python": platform.python_version()}
    return own | {name: version(name) for name in PACKAGES}


def bandwidth() -> dict | None:
    """Return the result of measure_bandwidth.py in this job, or None if the job has not measured it."""
    path = Path(os.environ.get("BANDWIDTH_FILE", ""))
    return json.loads(path.read_text()) if path.is_file() else None
