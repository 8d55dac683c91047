"""The job's own GPUs on this node, as `nvidia-smi -i` takes them: a memory log must not hold a neighbour's.

    PYTHONPATH=scripts python -m job.gpus --ranks 2
    nvidia-smi -i "$(PYTHONPATH=scripts python -m job.gpus --ranks 2)" --query-gpu=index,memory.used --format=csv

Prints for example `2,3` or `GPU-8f6d...`; `none` where the job sees no GPU; an empty line where its GPUs cannot be told
from the others. nvidia-smi itself ignores CUDA_VISIBLE_DEVICES and knows no MIG slice, only the whole GPU.
What the log will lack, or hold besides, is said as a line in --gaps. job.sh calls this, once per node.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from errors import OneLineErrors, run_program, whole_number

# Without persistence mode the driver starts anew for each call, which takes seconds per GPU
TIMEOUT = 30


@dataclass
class Gpu:
    index: int
    uuid: str
    slices: list[str] = field(default_factory=list)  # UUIDs of its MIG devices


class UnknownDevice(Exception):
    """CUDA_VISIBLE_DEVICES names a device that nvidia-smi does not list."""


def installed_gpus() -> list[Gpu]:
    """What nvidia-smi shows: the whole node, or, where cgroups hide the other devices, the job's own."""
    gpus: list[Gpu] = []
    for line in output("nvidia-smi", "-L").splitlines():
        if found := re.match(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", line):
            gpus.append(Gpu(int(found[1]), found[2]))
        elif gpus and (found := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)):
            gpus[-1].slices.append(found[1])
    return gpus


def output(*command: str) -> str:
    """What a command prints, nothing when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible_gpus(visible: str, gpus: list[Gpu]) -> dict[str, Gpu]:
    """Each entry of CUDA_VISIBLE_DEVICES and its GPU, in the order of the entries."""
    entries: dict[str, Gpu] = {}
    for entry in (text.strip() for text in visible.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry):
            break  # CUDA, too, ends at the first entry that is no device: -1, NoDevFiles
        entries[entry] = find(entry, gpus)
    return entries


def find(entry: str, gpus: list[Gpu]) -> Gpu:
    """The GPU of an index, a UUID or the beginning of one, or the parent of a MIG device."""
    # MIG devices of older drivers are MIG-GPU-<UUID of the parent>/<GPU instance>/<compute instance>
    uuid = entry.removeprefix("MIG-").split("/")[0] if entry.startswith("MIG-GPU-") else entry
    found = [
        gpu for gpu in gpus if entry == str(gpu.index) or any(name.startswith(uuid) for name in (gpu.uuid, *gpu.slices))
    ]
    if len(found) != 1:
        raise UnknownDevice(entry)
    return found[0]


def choose(ranks: int, gpus: list[Gpu], host: str) -> tuple[str, list[str]]:
    """What to print, and the gaps. gpus: those that nvidia-smi shows."""
    if not gpus:
        return "none", [f"nvidia-smi shows no GPU on {host}: no log of GPU memory"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(str(gpu.index) for gpu in gpus)
    try:
        entries = visible_gpus(visible, gpus)
    except UnknownDevice as device:
        what = f"nvidia-smi on {host} does not show {device} of CUDA_VISIBLE_DEVICES"
        return "", [f"{what}: the GPU log holds all that it shows, other jobs' too"]
    if not entries:
        return "none", [f"CUDA_VISIBLE_DEVICES is '{visible}' on {host}, the job sees no GPU: no log of GPU memory"]
    gaps = []
    if len(entries) < ranks and whole_number("SLURM_STEP_NUM_TASKS", "1") > 1:
        of_all_tasks = gpus_of_all_tasks(entries, gpus, host)
        if not of_all_tasks:
            what = f"Slurm gave each task on {host} GPUs of its own, and task 0 cannot see the others'"
            gaps.append(f"{what}: the GPU log holds GPU {', '.join(str(gpu.index) for gpu in entries.values())} alone")
        entries = of_all_tasks or entries
    else:
        entries = dict(list(entries.items())[:ranks])
    for gpu in {gpu.index: gpu for gpu in entries.values()}.values():
        if gpu.slices or any(entry.startswith("MIG-") for entry, parent in entries.items() if parent is gpu):
            gaps.append(f"GPU {gpu.index} on {host} is cut into MIG slices: its log holds the memory of all of them")
    names = (str(gpu.index) if entry.isdigit() else gpu.uuid for entry, gpu in entries.items())
    return ",".join(dict.fromkeys(names)), gaps


def gpus_of_all_tasks(own: dict[str, Gpu], gpus: list[Gpu], host: str) -> dict[str, Gpu]:
    """The job's GPUs on this node where nvidia-smi shows the whole node, else none."""
    if any(gpu.slices for gpu in gpus):
        return {}  # Slurm counts the slices
    indices = indices_of_job(host)
    found = {str(gpu.index): gpu for gpu in gpus if gpu.index in indices}
    whole_node = len(found) == len(indices) and {gpu.index for gpu in own.values()} <= indices
    return found if whole_node else {}


def indices_of_job(host: str) -> set[int]:
    """The job's GPUs on this node, as the whole node counts them; empty when Slurm does not tell.

    SLURM_STEP_GPUS would be the task's own alone, and SLURM_JOB_GPUS those of the first node, on all nodes.
    """
    details = output("scontrol", "show", "job", "--details", os.environ.get("SLURM_JOB_ID", ""))
    indices: set[int] = set()
    for nodes, gres in re.findall(r"^ +Nodes=(\S+) .*GRES=(\S*)", details, re.MULTILINE):
        if host in output("scontrol", "show", "hostnames", nodes).split():
            for ranges in re.findall(r"gpu[^(]*\(IDX:([\d,-]+)\)", gres):  # gpu:a100:3(IDX:0,2-3)
                for ends in (text.split("-") for text in ranges.split(",")):
                    indices.update(range(int(ends[0]), int(ends[-1]) + 1))
    return indices


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="of the job on this node; each uses one GPU")
    parser.add_argument("--gaps", type=Path, help="file to which the gaps are added; without it they go to stderr")
    arguments = parser.parse_args()
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    answer, gaps = choose(arguments.ranks, installed_gpus(), host)
    with arguments.gaps.open("a", encoding="utf-8") if arguments.gaps else nullcontext(sys.stderr) as file:
        file.writelines(f"{gap}\n" for gap in gaps)
    print(answer)


if __name__ == "__main__":
    run_program(main)
