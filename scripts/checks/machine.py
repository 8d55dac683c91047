"""Checks of preflight.py: packages, GPUs, network interfaces, site file, partition, and the cache of models and data.

PyTorch is imported inside the checks: it reads the site's variables when it is imported, and an installation that
cannot be imported is what a check must report. jobs.py does the same.
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

from shared.paths import EXPERIMENTS, REQUIREMENTS

# PyTorch builds for CUDA 12.6 are the last with code for compute capability 5.0 to 7.0, and run with older drivers
OTHER_BUILD = (
    "docs/environment.md says which torch it needs; for an older GPU or driver "
    "python -m pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
)
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/localscratch", "/scratch/local")
Lines = Iterator[tuple[str, ...]]  # state, check, what was found, what to do


def command(*words: object, timeout: float = 60, **options: Any) -> tuple[bool, str]:
    """Whether it ended well, and what it printed."""
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(list(map(str, words)), text=True, timeout=timeout, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{words[0]}: {error}"
    return done.returncode == 0, done.stdout.strip()


def last_line(log: str) -> str:
    """The last error line of a log, else its last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", log) if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]


# The site


def load_site(folder: Path) -> Lines:
    """Take over the variables of the site as a job has them. folder: for a file that is needed meanwhile."""
    dump = folder / "site.json"
    write = "import json, os, sys; json.dump([sys.prefix, dict(os.environ)], open(sys.argv[1], 'w'))"
    done, said = command("bash", EXPERIMENTS / "load_site.sh", "python", "-c", write, dump)
    if not done:
        yield "fail", "site", last_line(said), "all other checks depend on it"
        return
    prefix, variables = json.loads(dump.read_text())
    os.environ.update(variables)
    name = variables["SITE"]
    if Path(prefix).samefile(sys.prefix):
        yield "ok", "site", f"{name}, Python {sys.version.split()[0]} of {sys.prefix}"
    else:
        what = f"{name}: its python is in {prefix}, this one in {sys.prefix}"
        yield "warn", "site", what, "start preflight with the site's python, or correct site_setup"


def partition() -> Lines:
    if not shutil.which("sbatch"):
        yield "skip", "partition", "no Slurm here"
        return
    answers, said = command("sinfo", "--noheader", "--format=%R")
    known = sorted({*said.split()})
    wanted = os.environ.get("SBATCH_PARTITION", "")
    if not answers:
        state = "skip" if os.environ.get("REQUIRE_GPU") == "0" else "fail"  # a laptop may have Slurm's commands, too
        yield state, "partition", last_line(said), "is this a login node, and Slurm up?"
    elif absent := [name for name in wanted.split(",") if wanted and name not in known]:
        what = f"there is no {', '.join(absent)} among {', '.join(known)}"
        yield "fail", "partition", what, "correct SBATCH_PARTITION in the site file"
    else:
        yield "ok", "partition", wanted or f"Slurm's default of {', '.join(known)}"
    if reservation := os.environ.get("SBATCH_RESERVATION"):
        found, said = command("scontrol", "show", "reservation", reservation)
        if found:
            shown = re.findall(r"(?:StartTime|EndTime|State)=\S+", said)
            yield "ok", "reservation", f"{reservation} {' '.join(shown)}"
        else:
            yield "fail", "reservation", last_line(said), "correct SBATCH_RESERVATION in the site file"


def interfaces() -> Lines:
    present = sorted(os.listdir("/sys/class/net"))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if absent := absent_interfaces(value, present, exact=variable.startswith("GLOO")):
            # a login node may have other interfaces than those that train
            state = "fail" if "SLURM_JOB_ID" in os.environ else "warn"
            yield state, variable, f"{', '.join(absent)} is not among {', '.join(present)}", "see ip -brief address"
        else:
            yield "ok", variable, value or "not set: the library chooses"


def absent_interfaces(value: str, present: list[str], exact: bool) -> list[str]:
    """Names of the variable that fit no interface. NCCL's are prefixes, after = exact names, after ^ exclusions."""
    if not value or value.startswith("^"):
        return []
    exact = exact or value.startswith("=")
    names = value.removeprefix("=").split(",")
    return [n for n in names if not any(p == n if exact else p.startswith(n) for p in present)]


# The environment


def packages() -> Lines:
    if wrong := wrong_pins(REQUIREMENTS.read_text()):
        yield "fail", "packages", ", ".join(wrong), f"{sys.executable} -m pip install -r requirements.txt"
    else:
        yield "ok", "packages", "as in requirements.txt"


def wrong_pins(requirements: str) -> list[str]:
    """Pins that the installed packages do not have; a local version (2.13.0+cu130) is the pinned one."""
    wrong = []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", requirements, re.MULTILINE):
        try:
            installed = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            installed = "absent"
        if installed != pinned:
            wrong.append(f"{name} {installed} instead of {pinned}")
    return wrong


# GPUs


def gpus() -> Lines:
    import torch

    if not torch.cuda.is_available():
        yield from no_gpus(torch.__version__)
        return
    built = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        if built_for(capability, built):
            yield "ok", f"GPU {index}", found
        else:
            what = f"{found}: torch {torch.__version__} is built for {', '.join(built)}"
            yield "fail", f"GPU {index}", what, OTHER_BUILD


def no_gpus(torch_version: str) -> Lines:
    """Say why PyTorch can use no GPU. The machine has none, or the driver is too old for this build of torch."""
    listed, said = command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if os.environ.get("REQUIRE_GPU") == "0":
        yield "skip", "GPUs", "the site needs none"
    elif listed:
        what = f"nvidia-smi lists {last_line(said)}, and torch {torch_version} can use none"
        yield "fail", "GPUs", what, OTHER_BUILD
    else:
        found = f"none here ({last_line(said)})"
        yield "skip", "GPUs", found, "in a job: srun --gpus-per-node=1 python scripts/preflight.py"


def built_for(capability: tuple[int, int], arch_list: list[str]) -> bool:
    """Whether a GPU runs a build: machine code of its major version up to its minor one, or older PTX."""
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(arch_list)):
        built = int(major), int(minor)
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


# The cache of models and data sets


def cache(model_names: list[str], dataset: str) -> Lines:
    os.environ["HF_HUB_OFFLINE"] = "1"  # only what lies there counts
    from config import CUSTOM_GPT, TINY_BLOOM
    from data_loader import is_local

    models = [name for name in model_names if name not in (TINY_BLOOM, CUSTOM_GPT) and not Path(name).is_dir()]
    if not models and is_local(dataset):
        yield "skip", "cache", f"{', '.join(model_names)} and {Path(dataset).name} need none"
        return
    from datasets import load_dataset
    from huggingface_hub.constants import HF_HOME

    if not os.access(HF_HOME, os.W_OK):
        way_out = "create it, writable for all: runs put their tokenised data there"
        yield "warn", "HF_HOME", f"{HF_HOME} is not there, or cannot be written", way_out
    elif any(Path(HF_HOME).resolve().is_relative_to(folder) for folder in NODE_LOCAL) and shutil.which("sbatch"):
        yield "warn", "HF_HOME", f"{HF_HOME} is of this node alone", "choose a file system that all nodes see"
    else:
        yield "ok", "HF_HOME", HF_HOME
    prefetch = f"HF_HOME={HF_HOME} python scripts/prefetch.py"
    for name in models:
        try:
            yield "ok", "model", f"{name}, {cached_size(name) / 1e9:.1f} GB"
        except (OSError, ValueError) as error:
            yield "fail", "model", f"{name}: {error}", f"{prefetch} --model_name {name}"
    if not is_local(dataset):
        try:
            rows = {split: len(part) for split, part in load_dataset(dataset).items()}
            yield "ok", "dataset", f"{dataset}, {rows}"
        except Exception:  # the Hub client raises its own, httpx's and OSError
            found = f"{dataset} is not in the cache"
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
