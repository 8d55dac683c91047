"""Tests of NUMA_BINDING in jobs: its errors, torchrun's flag, and the line where it has no effect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY
from shell import program, shell_environment

RANK = "import os; os.write(1, f\"rank {os.environ['RANK']} {os.environ['BOUND']}\\n\".encode())"
NO_EFFECT = "NUMA_BINDING=node has no effect: {} starts this training, and only torchrun binds ranks"


def dry_run(workshop: Path, experiment: str, **variables: object) -> subprocess.CompletedProcess:
    folder = workshop / "experiments" / experiment
    (script,) = folder.glob("*.slurm")
    environment = shell_environment(DRY_RUN=1, **variables)
    return subprocess.run(["bash", script.name], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("variables", [{}, {"DRY_RUN": 1}], ids=str)
def test_a_wrong_value_is_one_error_line_and_writes_nothing(stub, variables):
    done, folder = stub(RANK, verb="run_torchrun", gpus=2, NUMA_BINDING="numa", **variables)
    remedy = "give node, socket, exclusive or core-complex, or leave it unset"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: NUMA_BINDING: 'numa' is unknown; {remedy}\n"
    assert not (folder / "results").exists()


def test_a_dry_run_shows_the_flag_of_torchrun(workshop):
    bound = dry_run(workshop, "deepspeed-multi-node/2_nodes", NUMA_BINDING="core-complex")
    assert (bound.returncode, bound.stderr) == (0, "")
    assert bound.stdout.count("--numa-binding=core-complex") == 1
    assert "has no effect" not in bound.stdout, "the bandwidth test before the training uses srun"
    unbound = dry_run(workshop, "deepspeed-multi-node/2_nodes")
    assert "numa" not in unbound.stdout


@pytest.mark.parametrize(
    ("experiment", "launcher"), [("deepspeed-native-launch/zero3_offload", "srun"), ("baseline", "python")]
)
def test_without_torchrun_a_line_says_that_nothing_is_bound(workshop, experiment, launcher):
    done = dry_run(workshop, experiment, NUMA_BINDING="node")
    assert (done.returncode, done.stderr) == (0, "")
    assert NO_EFFECT.format(launcher) in done.stdout.splitlines()
    assert "--numa-binding" not in done.stdout


@pytest.mark.parametrize("installed", [False, True])
def test_a_job_that_cannot_bind_ends_before_its_ranks_start(stub, tmp_path, installed):
    """This machine has no usable GPU, and the PATH of the job has a stub for numactl or none."""
    path = shell_environment()["PATH"].removesuffix(":/usr/bin:/bin")
    links = tmp_path / "bin"
    links.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for each in Path(folder).iterdir():
            if each.name != "numactl" and not (links / each.name).exists():
                (links / each.name).symlink_to(each)
    if installed:
        program(links, "numactl", "exit 9")
    variables = {"PATH": f"{path}:{links}", "CUDA_VISIBLE_DEVICES": ""}
    done, _ = stub(RANK, verb="run_torchrun", gpus=2, NUMA_BINDING="node", **variables)
    host = os.uname().nodename
    problem = f"PyTorch sees no GPU on {host}; run on a node with GPUs"
    if not installed:
        problem = f"the program numactl is not installed on {host}; install it"
    assert (done.returncode, done.stderr) == (3, f"error: NUMA_BINDING: {problem}, or leave NUMA_BINDING unset\n")
    assert "rank 0" not in done.stdout


# Start launch.py on a machine with two made-up GPUs near NUMA node 0
TWO_GPUS = """
import sys
sys.path.insert(0, {scripts!r})
import torch
from torch.numa import binding
torch.cuda.is_available = lambda: True
binding._get_gpu_count = lambda: 2
binding._get_numa_node_index_for_gpu_index = lambda *, gpu_index: 0
binding._get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED = lambda *, numa_node_index: set(range(4))
binding._get_allowed_cpu_indices_for_current_thread = lambda: set(range(4))
binding._get_logical_cpu_indices_sharing_same_physical_core_as = lambda *, logical_cpu_index: {{logical_cpu_index}}
import launch
launch.main()
"""


def test_each_rank_starts_under_numactl(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    stubs = program(tmp_path / "bin", "numactl", 'BOUND=$1 exec "${@:2}"').parent
    variables = {"PATH": f"{stubs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "4"}
    flags = ["--numa-binding=exclusive", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    command = [sys.executable, "-c", TWO_GPUS.format(scripts=str(REPOSITORY / "scripts")), *flags]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, *ranks = done.stdout.splitlines()
    host = os.uname().nodename
    assert first == f"NUMA_BINDING=exclusive on {host}: local rank 0 on CPUs 0-1, local rank 1 on CPUs 2-3"
    assert second == "OMP_NUM_THREADS=2 instead of 4: the ranks are bound to no more CPUs"
    assert sorted(ranks) == ["rank 0 --physcpubind=0-1", "rank 1 --physcpubind=2-3"]
