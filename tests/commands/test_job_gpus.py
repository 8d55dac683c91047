"""job/gpus.py: which GPUs of a node are the job's, with stand-ins for nvidia-smi and scontrol."""

import functools
import os
import re
import subprocess

import pytest

from helpers import REPOSITORY
from job.gpus import choose, indices_of_job, installed_gpus
from shell import program

UUIDS = [f"GPU-{number:08d}-0000-4000-8000-{number:012d}" for number in range(8)]
SLICE = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"
WHOLE_NODE = "".join(f"GPU {i}: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n" for i, uuid in enumerate(UUIDS))
ONE_GPU = f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[3]})\n"
SLICED = (
    f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[0]})\n"
    f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[1]})\n"
    "  MIG 1g.5gb      Device  0: (UUID: MIG-0b1f5b6c-aaaa-5ccc-8ddd-000000000000)\n"
    f"  MIG 2g.10gb     Device  1: (UUID: {SLICE})\n"
)
SLICED_OLD = (
    f"GPU 0: A100-SXM4-40GB (UUID: {UUIDS[0]})\n"
    f"GPU 1: A100-SXM4-40GB (UUID: {UUIDS[1]})\n"
    f"  MIG 1g.5gb Device 0: (UUID: MIG-{UUIDS[1]}/7/0)\n"
    f"  MIG 1g.5gb Device 1: (UUID: MIG-{UUIDS[1]}/8/0)\n"
)
NO_GPU = "No devices found.\n"
# as Slurm 22.05 prints it for a job on two nodes
DETAILS = """JobId=7 JobName=x
   JOB_GRES=gpu:6
     Nodes=node1 CPU_IDs=0 Mem=8000 GRES=gpu:3(IDX:0-2)
     Nodes=node2 CPU_IDs=1-2 Mem=8000 GRES=gpu:a100:3(IDX:1,4-5)
     Nodes=node[3-4] CPU_IDs=1 Mem=8000 GRES=gpu:a100:1(IDX:2),gpu:v100:1(IDX:6)
     Nodes=node5 CPU_IDs=1 Mem=8000 GRES=
     Nodes=node6 CPU_IDs=1 Mem=8000 GRES=gpu:1g.5gb:2(IDX:0-1)
   MinCPUsNode=1 MinMemoryCPU=8000M MinTmpDiskNode=0
"""
# what Slurm sets in each task of one srun step where each has a GPU of its own; the first two are no help there
BOUND = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1,2"}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Makes this a node whose nvidia-smi lists `text`, and whose scontrol knows job 7."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(text: str) -> None:
        (folder / "listing").write_text(text)
        program(folder, "nvidia-smi", f'[[ $* = -L ]] && cat "{folder}/listing"')

    (folder / "details").write_text(DETAILS)
    hostnames = 'case $3 in "node[3-4]") printf "node3\\nnode4\\n" ;; *) echo "$3" ;; esac'
    program(
        folder, "scontrol", f'if [[ $* = "show job --details 7" ]]; then cat "{folder}/details"; else {hostnames}; fi'
    )
    make(WHOLE_NODE)
    make.program = functools.partial(program, folder)
    return make


def chosen(monkeypatch, ranks: int, visible: str | None, host: str = "node1", **variables: str):
    for name, value in (variables | {"CUDA_VISIBLE_DEVICES": visible}).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    return choose(ranks, installed_gpus(), host)


@pytest.mark.parametrize(
    ("ranks", "visible", "expected"),
    [
        (2, "2,3", "2,3"),
        (2, "7,0", "7,0"),
        (1, "5", "5"),
        (2, "4,5,6,7", "4,5"),
        (2, None, "0,1"),
        (1, None, "0"),
        (2, UUIDS[2], UUIDS[2]),
        (2, f"{UUIDS[6]},{UUIDS[2]}", f"{UUIDS[6]},{UUIDS[2]}"),
        (1, UUIDS[6][:12], UUIDS[6]),
        (2, f"1, {UUIDS[2]}", f"1,{UUIDS[2]}"),
        (4, "1,-1,2", "1"),
        (8, None, "0,1,2,3,4,5,6,7"),
    ],
    ids=["indices", "their order", "one", "more than ranks", "nothing set", "nothing set, one rank", "UUID", "UUIDs",
         "beginning of a UUID", "both", "up to an invalid one", "all"],
)  # fmt: skip
def test_the_first_visible_gpus_are_the_jobs(node, monkeypatch, ranks, visible, expected):
    assert chosen(monkeypatch, ranks, visible) == (expected, [])


def test_where_cgroups_hide_the_others_indices_begin_at_0(node, monkeypatch):
    node(ONE_GPU)
    assert chosen(monkeypatch, 1, "0") == ("0", [])


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_job_that_sees_no_gpu_has_no_log(node, monkeypatch, visible):
    gap = f"CUDA_VISIBLE_DEVICES is '{visible}' on node1, the job sees no GPU: no log of GPU memory"
    assert chosen(monkeypatch, 1, visible) == ("none", [gap])


@pytest.mark.parametrize("visible", [None, "0"])
def test_nvidia_smi_without_a_gpu_is_a_gap(node, monkeypatch, visible):
    gap = ["nvidia-smi shows no GPU on node1: no log of GPU memory"]
    node(NO_GPU)
    assert chosen(monkeypatch, 1, visible) == ("none", gap)
    node.program("nvidia-smi", "echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9")
    assert chosen(monkeypatch, 1, visible) == ("none", gap)


@pytest.mark.parametrize("device", ["9", "GPU-9", "GPU-0000000", "MIG-9"])
def test_a_device_that_is_not_listed_leaves_the_log_unrestricted(node, monkeypatch, device):
    answer, gaps = chosen(monkeypatch, 2, f"0,{device}")
    what = f"nvidia-smi on node1 does not show {device} of CUDA_VISIBLE_DEVICES"
    assert (answer, gaps) == ("", [f"{what}: the GPU log holds all that it shows, other jobs' too"])


@pytest.mark.parametrize(
    ("listing", "ranks", "visible"),
    [
        (SLICED, 1, SLICE),
        (SLICED, 1, SLICE[:12]),
        (SLICED, 2, f"{SLICE},MIG-0b1f5b6c-aaaa-5ccc-8ddd-000000000000"),
        (SLICED_OLD, 1, f"MIG-{UUIDS[1]}/8/0"),
        (SLICED_OLD, 2, f"MIG-{UUIDS[1]}/8/0,MIG-{UUIDS[1]}/7/0"),
        (SLICED, 1, f"MIG-{UUIDS[1]}/8/0"),
        (WHOLE_NODE, 1, f"MIG-{UUIDS[1]}/8/0"),
        (SLICED, 1, UUIDS[1]),
    ],
    ids=["new", "beginning", "two of one GPU", "old", "two, old", "old name, new list", "old name, no list", "parent"],
)
def test_a_slice_is_logged_as_its_gpu_and_said(node, monkeypatch, listing, ranks, visible):
    node(listing)
    gap = "GPU 1 on node1 is cut into MIG slices: its log holds the memory of all of them"
    assert chosen(monkeypatch, ranks, visible) == (UUIDS[1], [gap])


def test_a_gpu_beside_a_sliced_one_is_no_gap(node, monkeypatch):
    node(SLICED)
    assert chosen(monkeypatch, 1, "0") == ("0", [])
    assert chosen(monkeypatch, 2, "0,1")[1] == [
        "GPU 1 on node1 is cut into MIG slices: its log holds the memory of all of them"
    ]


@pytest.mark.parametrize(("host", "visible", "expected"), [("node1", "0", "0,1,2"), ("node2", "4", "1,4,5")])
def test_gpus_of_all_tasks_where_each_sees_its_own(node, monkeypatch, host, visible, expected):
    """--gpus-per-task and --gpu-bind, on a node that hides nothing."""
    answer = chosen(monkeypatch, 3, visible, host, **BOUND, SLURM_STEP_GPUS=visible)
    assert answer == (expected, [])
    uuid = chosen(monkeypatch, 3, UUIDS[int(visible)], host, **BOUND, SLURM_STEP_GPUS=visible)
    assert uuid == (expected, [])


@pytest.mark.parametrize(
    ("listing", "host", "visible", "logged"),
    [
        (ONE_GPU, "node2", "0", "0"),
        (ONE_GPU, "node1", "0", "0"),
        (WHOLE_NODE, "node2", "0", "0"),
        (WHOLE_NODE, "node5", "0", "0"),
        (WHOLE_NODE, "elsewhere", "2", "2"),
        (SLICED, "node6", "0", "0"),
    ],
    ids=["hidden", "hidden, first index", "not the job's by Slurm's count", "no GPU", "unknown node", "slices"],
)
def test_gpus_of_other_tasks_that_cannot_be_told_are_a_gap(node, monkeypatch, listing, host, visible, logged):
    node(listing)
    what = f"Slurm gave each task on {host} GPUs of its own, and task 0 cannot see the others'"
    gap = f"{what}: the GPU log holds GPU {logged} alone"
    assert chosen(monkeypatch, 3, visible, host, **BOUND) == (logged, [gap])


def test_slurm_without_an_answer_is_a_gap(node, monkeypatch):
    node.program("scontrol", "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1")
    answer, gaps = chosen(monkeypatch, 3, "2", **BOUND)
    assert (answer, len(gaps)) == ("2", 1)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("node1", {0, 1, 2}), ("node2", {1, 4, 5}), ("node3", {2, 6}), ("node4", {2, 6}), ("node5", set())],
)
def test_indices_as_slurm_prints_them(node, monkeypatch, host, expected):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert indices_of_job(host) == expected


def test_the_command_prints_the_answer_and_adds_its_gaps(command, tmp_path):
    path = f"{REPOSITORY}/tests/slurm/bin:{os.environ['PATH']}"
    gaps = tmp_path / "gaps"
    gaps.write_text("another gap\n")
    done = command("job.gpus", "--ranks", 2, "--gaps", gaps, PATH=path, CUDA_VISIBLE_DEVICES="6,7")
    assert (done.code, done.stdout, gaps.read_text()) == (0, "6,7\n", "another gap\n")
    done = command("job.gpus", "--ranks", 2, "--gaps", gaps, PATH=path, SLURMD_NODENAME="node9")
    assert (done.code, done.stdout, done.log) == (0, "none\n", "")
    assert re.fullmatch("another gap\nCUDA_VISIBLE_DEVICES is '' on node9, .*\n", gaps.read_text())


# The stand-in of the tests


def nvidia_smi(*arguments: str) -> subprocess.CompletedProcess:
    command = [REPOSITORY / "tests/slurm/bin/nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_stand_in_shows_more_gpus_than_asked_for():
    query = ("--query-gpu=index,memory.total", "--format=csv,noheader,nounits")
    assert nvidia_smi(*query).stdout == "".join(f"{i}, 32768\n" for i in range(8))
    assert nvidia_smi("-i", f"5,{UUIDS[2]}", *query).stdout == "2, 32768\n5, 32768\n"
    unknown = nvidia_smi("-i", "1,8", *query)
    assert (unknown.returncode, unknown.stdout) == (6, "No devices were found\n")


def test_the_stand_in_lists_its_gpus_as_the_real_one(node, monkeypatch):
    monkeypatch.setenv("PATH", f"{REPOSITORY}/tests/slurm/bin:{os.environ['PATH']}")
    assert [(gpu.index, gpu.uuid) for gpu in installed_gpus()] == list(enumerate(UUIDS))
