"""Slow tests, such as a job of every experiment. `make test-experiments` runs them, and `make test` skips them."""

import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import run as run_command
from conftest import running_cluster
from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS
from job.directives import read_directives
from jobs import ENDLESS, Job, Lab, check_completed
from shared.paths import SAMPLE

pytestmark = [pytest.mark.experiments, pytest.mark.timeout(3600)]
# Configs that need a GPU, and the error that ends their experiments on the test cluster
REFUSED = {
    "full_shard_cpu_offload.json": r"error: .+full_shard_cpu_offload\.json: cpu_offload needs a GPU",
    "fsdp1_full_shard.json": r"error: .+fsdp1_full_shard\.json: FSDP1 needs a GPU",
}
# The site laptop sets no model for these, and their defaults are on the Hub
OWN_MODEL = {
    "own-model/train": {"MODEL_NAME": "tiny-bloom", "DATASET": str(SAMPLE), "MAX_LENGTH": 192, "EVAL_SIZE": 16},
    "own-model/chat": {"MODEL_NAME": "tiny-bloom"},
}


def shape(script: Path) -> tuple[int, int]:
    asked = read_directives(script)
    return int(asked["nodes"]), int(asked["gpus-per-node"])


@pytest.fixture(scope="module")
def large_lab(tmp_path_factory) -> Iterator[Lab]:
    """A cluster with as many nodes as the largest experiment requests."""
    for cluster in running_cluster(nodes=max(shape(script)[0] for script in EXPERIMENT_SCRIPTS)):
        yield Lab(tmp_path_factory.mktemp("experiments"), cluster)


@pytest.fixture(scope="module")
def ended(large_lab, request):
    """``ended(script)`` returns the script's ended job. The jobs of the selected tests start early, two at a time."""
    pool = ThreadPoolExecutor(max_workers=2)

    def run(script: Path) -> Job:
        experiment = str(script.parent.relative_to(EXPERIMENTS))
        arguments = ("--cpu", "--rows", "plain", "zero2") if experiment == "gpu-check" else ()
        own = OWN_MODEL.get(experiment, {})
        return large_lab.submit(experiment, *arguments, NUM_EPOCHS=1, **own).wait(timeout=3000)

    items = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = [item.params["script"] for item in items if item and "script" in item.params]
    futures = {script: pool.submit(run, script) for script in EXPERIMENT_SCRIPTS if script in wanted}
    yield lambda script: futures[script].result()
    pool.shutdown(wait=False, cancel_futures=True)
    run_command(["scancel", "--user=root"], env=large_lab.cluster.env, check=False)
    pool.shutdown()


@pytest.mark.promise("each experiment completes")
@pytest.mark.parametrize("script", EXPERIMENT_SCRIPTS, ids=lambda path: str(path.relative_to(EXPERIMENTS)))
def test_experiment(script: Path, ended):
    if script.parent.name == "compile" and not shutil.which("g++"):
        pytest.skip("torch.compile needs g++")
    job, (nodes, gpus) = ended(script), shape(script)
    for config, error in REFUSED.items():
        if f"/{config}" in script.read_text():
            assert (job.state, job.code) == ("FAILED", 3), str(job)
            assert len(job.error_lines) == 1, str(job)
            assert re.match(error, job.error_lines[0])
            return
    if script.parent.name == "gpu-check":
        check_table(job)
        return
    check_completed(job, nodes, gpus)
    if nodes > 1:
        assert job.record["bandwidth"]["ranks"] == nodes * gpus
        assert job.record["bandwidth"]["bus_bandwidth_gb_per_s"] > 0


def check_table(job: Job) -> None:
    """Check the table of gpu_check.py, whose job has no run record because each row is a separate training."""
    assert (job.state, job.code) == ("COMPLETED", 0), str(job)
    table = (job.folder / "results/gpu_check/gpu_check.md").read_text()
    assert [line.split("|")[1:3] for line in table.splitlines() if "completed" in line] == [
        [f" {name:5} ", " completed "] for name in ("plain", "zero2")
    ]
    assert "missing: no run record: the job is not a training" in job.summary


def test_a_job_at_its_time_limit_reports_it(lab):
    job = lab.submit("baseline", sbatch=("--time=00:01:00",), **ENDLESS).wait()
    assert job.state == "TIMEOUT", str(job)
    assert job.processes() == {}
    assert job.record["status"] == "timeout"
    assert job.losses


def test_a_killed_rank_of_bare_srun_ends_the_others(lab):
    job = lab.submit("deepspeed-native-launch/zero3_offload", **ENDLESS)
    job.wait_for_training()
    # on_node.py, the parent of the rank, has no PET_NODE_RANK
    assert job.kill("node1", signal.SIGKILL, "train.py", "SLURM_PROCID=1\0", "PET_NODE_RANK=0\0") == 1
    job.wait()
    assert (job.state, job.code) == ("FAILED", 137), str(job)
    assert job.record["status"] == "failed"
    assert job.record["reason"].startswith("rank 1 on node1 ended first, with exit code 137 (killed, ")
    assert job.processes() == {}
