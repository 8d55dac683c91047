"""Tests of jobs with other flags of sbatch than those in their scripts, on a real cluster. The training only prints."""

import re
import shlex
import shutil

import pytest

from jobs import Lab
from records.schema import read_attempts

NODES, SRUN, TWO_GPUS = "deepspeed-multi-node/2_nodes", "deepspeed-native-launch/zero3_offload", "ddp/2_gpus"
OWN = "own/without_gpus"  # Slurm refuses --gpus=3 for a script with --gpus-per-node=2
PRINT = """import os
names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
os.write(1, "rank {} of {}\\n".format(*map(os.environ.get, names)).encode())
"""
SITE = 'source "$EXPERIMENTS_FOLDER/sites/laptop.sh"\nsite_setup() {{ PATH={path}; }}\nMIN_BANDWIDTH=0\n'


@pytest.fixture
def printing_lab(editable_lab) -> Lab:
    """A lab whose training prints its rank. Its site file sets PATH, because some jobs get no variables from sbatch."""
    experiments = editable_lab.root / "experiments"
    (editable_lab.root / "scripts/train.py").write_text(PRINT)
    (experiments / "sites/moon.sh").write_text(SITE.format(path=shlex.quote(editable_lab.path)))
    (experiments / "site").write_text("moon\n")
    script = shutil.copytree(experiments / TWO_GPUS, experiments / OWN) / "ddp.slurm"
    script.write_text(re.sub("#SBATCH --gpus-per-node.*\n", "", script.read_text()))
    return editable_lab


CASES = [
    (NODES, "--export=NONE", 2, []),
    (NODES, "--export=X=1", 2, []),
    (SRUN, "--export=NONE", 2, []),
    (SRUN, "--export=X=1", 2, []),
    (TWO_GPUS, "--gres=gpu:3", 3, ["gpus-per-node: 3 instead of 2"]),
    (OWN, "--gres=gpu:2", 2, ["gpus-per-node: 2 instead of 1"]),
    (OWN, "--gpus=2", 2, ["gpus-per-node: 2 instead of 1"]),
    (OWN, "-G2", 2, ["gpus-per-node: 2 instead of 1"]),
]


@pytest.mark.promise("a job uses the nodes and GPUs that Slurm allocated")
def test_jobs_use_their_allocation(printing_lab):
    """One test, because the jobs run at the same time."""
    jobs = [printing_lab.submit(experiment, sbatch=(flag,), SITE=None) for experiment, flag, *_ in CASES]
    unequal = printing_lab.submit(OWN, sbatch=("--nodes=2", "--gpus=3"), SITE=None)
    for job, (_, _, ranks, overrides) in zip(jobs, CASES, strict=True):
        job.wait()
        assert (job.state, job.code) == ("COMPLETED", 0), str(job)
        shown = sorted(re.findall(r"^rank .*", job.log, re.MULTILINE))
        assert shown == [f"rank {rank} of {ranks}" for rank in range(ranks)], str(job)
        assert read_attempts(job.record_path)[-1].overrides == overrides
    unequal.wait()
    assert (unequal.state, unequal.code) == ("FAILED", 2), str(unequal)
    assert unequal.error_lines[0].startswith("error: --gpus: 3 GPUs on 2 nodes, of which this node has "), str(unequal)
