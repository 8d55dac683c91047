"""Checks of preflight.py: packages, compilers, GPUs, network interfaces, site file.

PyTorch is imported inside the checks: it reads the site's variables when it is imported, and an installation that
cannot be imported is what a check must report. The other modules of checks/ do the same.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import EXPERIMENTS, REQUIREMENTS

# PyTorch builds for CUDA 12.6 are the last with code for compute capability 5.0 to 7.0, and run with older drivers
OLDER_BUILD = "python -m pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
OLDEST_OF_CUDA_13 = (7, 5)
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


@dataclass(frozen=True)
class Site:
    """name: empty where its variables could not be read. problem, way_out: empty where all is well."""

    name: str
    problem: str = ""
    way_out: str = ""


def load_site(folder: Path) -> Site:
    """Take over the variables of the site as a job has them. folder: for a file that is needed meanwhile."""
    dump = folder / "site.json"
    write = "import json, os, sys; json.dump([sys.prefix, dict(os.environ)], open(sys.argv[1], 'w'))"
    done, said = command("bash", EXPERIMENTS / "load_site.sh", "python", "-c", write, dump)
    if not done or not dump.is_file():
        return unread_site(said)
    prefix, variables = json.loads(dump.read_text())
    os.environ.update(variables)
    name = variables["SITE"]
    if Path(prefix).samefile(sys.prefix):
        return Site(name)
    what = f"{name}: its python is in {prefix}, this one in {sys.prefix}"
    return Site(name, what, "start preflight with the site's python, or correct site_setup")


def unread_site(said: str) -> Site:
    """What load_site.sh said: an error line of its own, or what the site's commands printed last."""
    last = last_line(said)
    if last.startswith("error: "):
        problem, _, way_out = last.removeprefix("error: ").rpartition("; ")
        return Site("", problem, way_out)
    found = re.search(r"^site: (.*)$", said, re.MULTILINE)
    file = f"experiments/sites/{found[1]}.sh" if found else "experiments/load_site.sh"
    reason = "no output" if last.startswith("site: ") else last
    return Site("", f"{file} gives no python ({reason})", "correct its site_setup")


def environment() -> Lines:
    found = f"{sys.version.split()[0]} in {sys.prefix}"
    if sys.version_info >= (3, 11):  # noqa: UP036 - an older one may have started this
        yield "ok", "Python", found
    else:
        yield "fail", "Python", found, "3.11 or newer is needed"
    if wrong := wrong_pins(REQUIREMENTS.read_text()):
        yield "fail", "packages", ", ".join(wrong), f"{sys.executable} -m pip install -r requirements.txt"
    else:
        yield "ok", "packages", "as in requirements.txt"
    from build_ops import prepare_deepspeed

    folder = prepare_deepspeed()
    yield from compilers()
    for tool in ("psrecord", "nvidia-smi"):
        if tool == "nvidia-smi" and not shutil.which(tool) and not Path("/proc/driver/nvidia").exists():
            yield "skip", tool, "no GPU on this machine"
        elif path := shutil.which(tool):
            yield "ok", tool, path
        else:
            yield "warn", tool, "not on PATH", "memory logs will be missing; add it in site_setup"
    yield extensions(folder)


def compilers() -> Lines:
    """What DeepSpeed compiles its optimizers with: CPUAdam needs a C++ compiler and ninja, FusedAdam on a GPU nvcc."""
    import torch

    from build_ops import CPP_STANDARD, NO_NVCC, cpp_compiler, nvcc, problem, refuses_standard

    if found := problem("CPUAdamBuilder"):
        yield "fail", found.source, found.what, found.way_out
    elif said := refuses_standard(cpp_compiler()):
        yield "fail", "compiler", f"{cpp_compiler()} does not know {CPP_STANDARD} ({said})", "load GCC 11 or newer"
    else:
        yield "ok", "compiler", f"{cpp_compiler()} knows {CPP_STANDARD}, ninja is {shutil.which('ninja')}"
    cuda = torch.version.cuda
    if not cuda or os.environ.get("REQUIRE_GPU") == "0":
        yield "skip", "nvcc", "torch is a CPU build" if not cuda else "the site needs no GPU"
    elif not (path := nvcc()):
        way_out = "load it in site_setup (module load cuda): FusedAdam, of ZeRO without offload, is compiled with it"
        yield "fail", "nvcc", NO_NVCC, way_out
    elif other := nvcc_mismatch(command(path, "--version")[1], cuda):
        what = f"{other} in {path}, torch is for CUDA {cuda}"
        yield "warn", "nvcc", what, "load the module of that major version; nothing else checks this before it fails"
    else:
        yield "ok", "nvcc", path


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


def nvcc_mismatch(said: str, cuda: str) -> str:
    """Version that ``nvcc --version`` names, if its major version is not that of PyTorch's CUDA."""
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        return "no version"
    return "" if release[1] == cuda.split(".")[0] else f"{release[1]}.{release[2]}"


def extensions(folder: Path) -> tuple[str, ...]:
    """DeepSpeed's compiled optimizers: there, or still to come."""
    if not (folder / "cpu_adam" / "cpu_adam.so").is_file():
        what = f"no CPU optimizer in {folder}"
        return "warn", "DeepSpeed build", what, "the first run compiles it for 1 to 2 minutes"
    return "ok", "DeepSpeed build", f"CPU optimizer in {folder}"


def gpus() -> Lines:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        built = torch.cuda.get_arch_list()
        found = f"{name}, compute capability {capability[0]}.{capability[1]}"
        if built_for(capability, built):
            yield "ok", f"GPU {index}", found
        else:
            what = f"{found}: torch {torch.__version__} is built for {', '.join(built)}"
            way_out = OLDER_BUILD if capability < OLDEST_OF_CUDA_13 else "install a torch build for it"
            yield "fail", f"GPU {index}", what, f"{way_out} (docs/environment.md)"
    if count:
        return
    if os.environ.get("REQUIRE_GPU") == "0":
        yield "skip", "GPUs", "the site needs none"
        return
    seen, said = command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", timeout=30)
    if seen and said:
        yield "fail", "GPUs", *unusable(said, torch.__version__, torch.version.cuda)
    elif shutil.which("nvidia-smi") and Path("/proc/driver/nvidia").exists():
        yield "fail", "GPUs", f"nvidia-smi: {last_line(said)}", "take this node out of the partition"
    else:
        yield "skip", "GPUs", "none here", "in a job: srun --gpus-per-node=1 python scripts/preflight.py"


def built_for(capability: tuple[int, int], arch_list: list[str]) -> bool:
    """Whether a GPU runs a build: machine code of its major version up to its minor one, or older PTX."""
    for arch in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if not found:
            continue
        kind = found[1]
        major = int(found[2])
        minor = int(found[3])
        suffix = found[4]
        same = major == capability[0]
        if suffix == "a":  # code for exactly this chip
            runs = same and minor == capability[1]
        elif kind == "sm" or suffix == "f":
            runs = same and minor <= capability[1]
        else:
            runs = (major, minor) <= capability
        if runs:
            return True
    return False


def unusable(nvidia_smi: str, version: str, cuda: str | None) -> tuple[str, str]:
    """Why PyTorch uses none of the GPUs that nvidia-smi lists as ``name, driver version``."""
    name, driver = nvidia_smi.splitlines()[0].rsplit(", ", 1)
    if cuda is None:
        return f"{name} is here, and torch {version} is a CPU build", "install a CUDA build of torch"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES hides {name}", "unset it"
    what = f"driver {driver} of {name} is too old for CUDA {cuda} (CUDA 13 needs 580 or newer, CUDA 12 needs 525)"
    return what, f"a newer driver, or {OLDER_BUILD} (docs/environment.md)"


def nccl(site: Site) -> Lines:
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        yield "ok", "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    else:
        yield "skip", "NCCL", "no GPU"
    if not site.name:
        yield "skip", "interfaces", "the site was not read"
        return
    present = sorted(os.listdir("/sys/class/net"))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if absent := absent_interfaces(value, present, exact=variable.startswith("GLOO")):
            what = f"{', '.join(absent)} is not among {', '.join(present)}"
            # a login node may have other interfaces than those that train
            yield "fail" if gpu or "SLURM_JOB_ID" in os.environ else "warn", variable, what, "see ip -brief address"
        else:
            yield "ok", variable, value or "not set: the library chooses"


def absent_interfaces(value: str, present: list[str], exact: bool) -> list[str]:
    """Names of the variable that fit no interface. NCCL's are prefixes, after = exact names, after ^ exclusions."""
    if not value or value.startswith("^"):
        return []
    exact = exact or value.startswith("=")
    names = value.removeprefix("=").split(",")
    return [n for n in names if not any(p == n if exact else p.startswith(n) for p in present)]


def check_site(site: Site) -> Lines:
    if not site.name:
        yield "fail", "site", site.problem, site.way_out
    elif site.problem:
        yield "warn", "site", site.problem, site.way_out
    else:
        yield "ok", "site", f"{site.name}, python of {sys.prefix}"
    if not shutil.which("sbatch"):
        yield "skip", "partition", "no Slurm here"
        return
    if not site.name:
        yield "skip", "partition", "the site was not read"
        return
    answers, said = command("sinfo", "--noheader", "--format=%R", timeout=30)
    partitions = os.environ.get("SBATCH_PARTITION", "")
    if not answers and os.environ.get("REQUIRE_GPU") == "0":
        yield "skip", "partition", "sinfo does not answer, and the site needs no Slurm"
    elif not answers:
        yield "fail", "partition", last_line(said), "is this a login node, and Slurm up?"
    elif absent := sorted({*filter(None, partitions.split(","))} - {*said.split()}):
        what = f"there is no {', '.join(absent)} among {', '.join(sorted({*said.split()}))}"
        yield "fail", "partition", what, "correct SBATCH_PARTITION in the site file"
    else:
        yield "ok", "partition", partitions or f"Slurm's default of {', '.join(sorted({*said.split()}))}"
    if reservation := os.environ.get("SBATCH_RESERVATION"):
        known, said = command("scontrol", "show", "reservation", reservation, timeout=30)
        shown = " ".join(re.findall(r"(?:StartTime|EndTime|State)=\S+", said))
        if known:
            yield "ok", "reservation", f"{reservation} {shown}"
        else:
            yield "fail", "reservation", last_line(said), "correct SBATCH_RESERVATION in the site file"
