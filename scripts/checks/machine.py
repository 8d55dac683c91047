"""Checks of preflight.py: packages, GPUs, network interfaces, site file, partition, and the cache of models and data.

The checks here and in jobs.py import PyTorch inside functions. PyTorch reads the site's variables on import, so the
site must be loaded first. A broken PyTorch then also becomes a failed check instead of a traceback.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.paths import CONSTRAINTS, EXPERIMENTS, REQUIREMENTS

# PyTorch builds for CUDA 12.6 are the last with code for compute capability 5.0 to 7.0, and they run with older drivers
OTHER_BUILD = (
    "docs/environment.md says which torch this machine needs; for an older GPU or driver: "
    "python -m pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
)
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/localscratch", "/scratch/local")
Lines = Iterator[tuple[str, ...]]  # state, name of the check, finding, remedy


def run_command(*words: object, timeout: float | None = 60, **options: Any) -> tuple[bool, str]:
    """Run a command. Return True if it succeeded, and its output."""
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(list(map(str, words)), text=True, timeout=timeout, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{words[0]}: {error}"
    return done.returncode == 0, done.stdout.strip()


def last_line(log: str) -> str:
    """Return the last error line of a log. Without an error line, return the last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", log) if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]


# The site


def load_site(folder: Path) -> Lines:
    """Set the variables of the site as in a job. folder: place for a temporary file."""
    dump = folder / "site.json"
    write = "import json, os, sys; json.dump([sys.prefix, dict(os.environ)], open(sys.argv[1], 'w'))"
    done, output = run_command("bash", EXPERIMENTS / "load_site.sh", "python", "-c", write, dump)
    if not done:
        yield "fail", "site", last_line(output), "correct the site first: all other checks depend on it"
        return
    prefix, variables = json.loads(dump.read_text())
    os.environ.update(variables)
    name = variables["SITE"]
    if Path(prefix).samefile(sys.prefix):
        yield "ok", "site", f"{name}, Python {sys.version.split()[0]} in {sys.prefix}"
    else:
        what = f"{name}: the site's python is in {prefix}, preflight's python in {sys.prefix}"
        yield "warn", "site", what, "start preflight with the site's python, or correct site_setup"


def partition() -> Lines:
    if not shutil.which("sbatch"):
        yield "skip", "partition", "no Slurm here"
        return
    answers, output = run_command("sinfo", "--noheader", "--format=%R")
    known = sorted({*output.split()})
    wanted = os.environ.get("SBATCH_PARTITION", "")
    if not answers:
        state = "skip" if os.environ.get("REQUIRE_GPU") == "0" else "fail"  # a laptop may also have Slurm's commands
        yield state, "partition", last_line(output), "check that this is a login node and that Slurm is up"
    elif absent := [name for name in wanted.split(",") if wanted and name not in known]:
        what = f"{', '.join(absent)} is not among {', '.join(known)}"
        yield "fail", "partition", what, "correct SBATCH_PARTITION in the site file"
    else:
        yield "ok", "partition", wanted or f"Slurm's default of {', '.join(known)}"
    if reservation := os.environ.get("SBATCH_RESERVATION"):
        found, output = run_command("scontrol", "show", "reservation", reservation)
        if found:
            shown = re.findall(r"(?:StartTime|EndTime|State)=\S+", output)
            yield "ok", "reservation", f"{reservation} {' '.join(shown)}"
        else:
            yield "fail", "reservation", last_line(output), "correct SBATCH_RESERVATION in the site file"


def interfaces() -> Lines:
    present = sorted(os.listdir("/sys/class/net"))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if absent := absent_interfaces(value, present, exact=variable.startswith("GLOO")):
            # a login node may have other interfaces than the compute nodes
            state = "fail" if "SLURM_JOB_ID" in os.environ else "warn"
            yield state, variable, f"{', '.join(absent)} is not among {', '.join(present)}", "see ip -brief address"
        else:
            yield "ok", variable, value or "not set, so the library chooses"


def absent_interfaces(value: str, present: list[str], exact: bool) -> list[str]:
    """Return the names in the variable's value that match no interface.

    NCCL reads the names as prefixes. After "=" they are exact names, and after "^" they are exclusions.
    """
    if not value or value.startswith("^"):
        return []
    exact = exact or value.startswith("=")
    names = value.removeprefix("=").split(",")
    return [n for n in names if not any(p == n if exact else p.startswith(n) for p in present)]


# The environment


def packages() -> Lines:
    remedy = f"{sys.executable} -m pip install -r requirements.txt"
    if wrong := wrong_pins(REQUIREMENTS):
        yield "fail", "packages", ", ".join(wrong), remedy
    # A site may install a newer NCCL for its network
    elif others := [text for text in wrong_pins(CONSTRAINTS, absent=False) if not text.startswith("nvidia-nccl-")]:
        yield "warn", "packages", ", ".join(others), remedy
    else:
        yield "ok", "packages", "as in requirements.txt and constraints.txt"


def wrong_pins(file: Path, absent: bool = True) -> list[str]:
    """Return the pins that differ from the installed version, and (if `absent`) those of packages not installed.

    A local version such as 2.13.0+cu130 fits pin 2.13.0.
    """
    wrong = []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE):
        try:
            installed = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            installed = "absent" if absent else pinned
        if installed != pinned:
            wrong.append(f"{name} {installed} instead of {pinned}")
    return wrong


# GPUs


def gpus() -> Lines:
    import torch

    from checks.gpu_health import gpu_health

    if not torch.cuda.is_available():
        yield from explain_missing_gpus(torch.__version__)
        return
    built = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        if supports_gpu(built, capability):
            state, health, *remedy = gpu_health(index)
            yield state, f"GPU {index}", f"{found}, {health}", *remedy
        else:
            what = f"{found}: torch {torch.__version__} is built for {', '.join(built)}"
            yield "fail", f"GPU {index}", what, OTHER_BUILD


def explain_missing_gpus(torch_version: str) -> Lines:
    """Explain why PyTorch finds no GPU: the machine has none, or the driver is too old for this build of torch."""
    listed, output = run_command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if os.environ.get("REQUIRE_GPU") == "0":
        yield "skip", "GPUs", "not needed at this site"
    elif listed:
        what = f"nvidia-smi lists {last_line(output)}, but torch {torch_version} cannot use a GPU"
        yield "fail", "GPUs", what, OTHER_BUILD
    else:
        found = f"there is none on this machine ({last_line(output)})"
        yield "skip", "GPUs", found, "check them in a job: srun --gpus-per-node=1 python scripts/preflight.py"


def supports_gpu(arch_list: list[str], capability: tuple[int, int]) -> bool:
    """Check that a PyTorch build has code for a GPU of this compute capability.

    A GPU runs machine code that is built for its own major version, and for its own or a lower minor version. It also
    runs any PTX that is not newer than the GPU.
    """
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(arch_list)):
        built = int(major), int(minor)
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


# The cache of models and data sets


def cache(model_names: list[str], dataset: str) -> Lines:
    os.environ["HF_HUB_OFFLINE"] = "1"  # look only into the cache
    from config import CUSTOM_GPT, TINY_BLOOM
    from data_loader import find_files

    models = [name for name in model_names if name not in (TINY_BLOOM, CUSTOM_GPT) and not Path(name).is_dir()]
    if not models and find_files(dataset):
        yield "skip", "cache", f"{', '.join(model_names)} and {Path(dataset).name} need no cache"
        return
    from datasets import load_dataset
    from huggingface_hub.constants import HF_HOME

    if not os.access(HF_HOME, os.W_OK):
        remedy = "create the folder and let all users write: runs put their tokenised data there"
        yield "warn", "HF_HOME", f"{HF_HOME} does not exist or is not writable", remedy
    elif any(Path(HF_HOME).resolve().is_relative_to(folder) for folder in NODE_LOCAL) and shutil.which("sbatch"):
        yield "warn", "HF_HOME", f"{HF_HOME} is local to this node", "choose a file system that all nodes share"
    else:
        yield "ok", "HF_HOME", HF_HOME
    prefetch = f"HF_HOME={HF_HOME} python scripts/prefetch.py"
    for name in models:
        try:
            yield "ok", "model", f"{name}, {cached_size(name) / 1e9:.1f} GB"
        except (OSError, ValueError) as error:
            yield "fail", "model", f"{name}: {error}", f"{prefetch} --model_name {name}"
    if not find_files(dataset):
        try:
            rows = {split: len(part) for split, part in load_dataset(f"hf://datasets/{dataset}").items()}
            yield "ok", "dataset", f"{dataset}, {rows}"
        except Exception as error:  # the Hub client raises exceptions of its own, of httpx, and OSError
            found = f"{dataset} cannot be read from the cache: {error}"
            yield "fail", "dataset", found, f"{prefetch} --dataset {dataset}"


def cached_size(name: str) -> int:
    """Return the bytes of a model in the cache. Raises OSError if the model is missing or incomplete."""
    import huggingface_hub

    from shared.hub import MODEL_FILES

    folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True, allow_patterns=MODEL_FILES))
    files = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    if not any(name.endswith((".safetensors", ".bin")) for name in files):
        raise FileNotFoundError("its weights are not in the cache")
    return sum(files.values())
