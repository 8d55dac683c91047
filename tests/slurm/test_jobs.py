"""Tests of jobs on a real Slurm cluster: one job of each launcher, a killed job and a cancelled job.

test_requeue.py tests stopped and requeued jobs and node crashes. tests/commands and tests/faults run job.sh without
Slurm.
"""

import re
import signal
import subprocess
import sys

import pytest

from cluster import DOMAIN
from cluster import run as run_command
from job.memory_logs import read_cpu_log, read_gpu_log
from jobs import ENDLESS, GIT, LONG, TRAININGS, Job, Lab, check_completed
from one_liners import check_one_liners

NODES = {"node1", "node2"}
BAD_NAME = "x; touch pwned $(touch pwned2) `touch pwned3`"


@pytest.fixture(scope="module")
def one_gpu(cluster, tmp_path_factory) -> Job:
    """A job of `python` on one GPU from submit.sh --snapshot. While it waits, the repository gets broken code."""
    lab = Lab(tmp_path_factory.mktemp("edited"), cluster)
    names = {"SBATCH_JOB_NAME": BAD_NAME, "EXPERIMENT_NAME": BAD_NAME}
    partition = ["scontrol", "update", "PartitionName=main"]
    run_command([*partition, "State=DOWN"], env=cluster.env)
    try:
        (job,) = lab.submit_sh("--snapshot", "baseline", **TRAININGS["plain"][2], **names)
        (lab.root / "scripts/train.py").write_text("raise SystemExit(99)")
        (lab.root / "scripts/run_job.py").unlink()
        for arguments in (["add", "-A"], ["commit", "-qm", "edit"]):
            run_command([*GIT, *arguments], cwd=lab.root)
    finally:
        run_command([*partition, "State=UP"], env=cluster.env)
    return job.wait()


@pytest.fixture(scope="module")
def srun(lab) -> Job:
    """A job of bare srun on two nodes with two ranks each."""
    knobs = {"LEARNING_RATE": "5e-3", "TRAIN_SIZE": 48}
    flags = ("--model-name", "tiny-bloom", "--steps", 4, "--learning_rate", "1e-4")
    return lab.submit("deepspeed-native-launch/zero3_offload", *flags, sbatch=("--nodes=2",), **knobs).wait()


@pytest.mark.promise("what a job leaves")
def test_a_job_of_python_leaves_record_logs_and_summary(one_gpu):
    check_completed(one_gpu, nodes=1, gpus=1)
    assert {path.split("/")[0] for path in one_gpu.files()} == {"log", "gpu_memory", "cpu_memory", "results", "output"}
    files = {str(path.relative_to(one_gpu.folder)) for path in one_gpu.folder.rglob("*") if path.is_file()}
    assert files - one_gpu.files() == {"baseline.slurm", "env_vars.sh", "log/.gitignore"}
    check_one_liners(one_gpu.record_path)


def test_a_snapshot_runs_the_code_of_its_submission(one_gpu):
    assert (one_gpu.state, one_gpu.code) == ("COMPLETED", 0), str(one_gpu)
    submitted = run_command([*GIT, "rev-parse", "HEAD~"], cwd=one_gpu.lab.root).stdout.strip()
    assert one_gpu.record["git"] == {"commit": submitted, "dirty": False}


@pytest.mark.promise("records and logs are text")
def test_shell_characters_in_names_execute_nothing(one_gpu):
    assert one_gpu.log_path.name == f"{BAD_NAME}_{one_gpu.job_id}.out"
    assert one_gpu.record["run_name"] == BAD_NAME
    assert not list(one_gpu.lab.root.rglob("pwned*"))


def test_a_job_of_torchrun_on_two_nodes_leaves_record_logs_and_summary(undisturbed):
    job = undisturbed("zero-2")
    check_completed(job, nodes=2, gpus=1)
    assert job.effective("strategy").startswith("DeepSpeed ZeRO-2")
    bandwidth = job.record["bandwidth"]
    printed = re.search(r"^bandwidth test: bus_bandwidth_gb_per_s ([0-9.]+), ranks 2, ", job.log, re.MULTILINE)
    assert bandwidth["bus_bandwidth_gb_per_s"] == float(printed[1]) > 0
    assert (bandwidth["ranks"], bandwidth["backend"]) == (2, "gloo")


def test_a_job_of_bare_srun_leaves_record_logs_and_summary(srun):
    check_completed(srun, nodes=2, gpus=2)
    assert srun.record["settings"]["max_steps"] == 4
    assert srun.record["overrides"] == ["nodes: 2 instead of 1"]
    assert srun.record["bandwidth"] is None
    assert "torchrun" not in srun.log
    assert "Parameter offloading: True" in srun.log


@pytest.mark.promise("each knob is shown with its source")
def test_values_at_submission_override_the_defaults(srun):
    """A flag overrides a variable, which overrides the site, then the experiment, then the default."""
    settings = srun.record["settings"]
    assert settings["learning_rate"] == 1e-4, "the flag, over the variable and the site"
    assert settings["train_size"] == 48, "the variable, over the site"
    assert settings["eval_size"] == 32, "the site, over the default"
    assert settings["save_strategy"] == "no", "the experiment, over the default"
    assert settings["weight_decay"] == 0.01, "the default"
    origins = srun.record["origins"]
    flags = ("learning_rate", "train_size", "eval_size", "save_strategy", "weight_decay")
    assert [origins.get(flag) for flag in flags] == ["flag", "submission", "site", "experiment", None]
    assert re.search(r"^  submission .*TRAIN_SIZE=48", srun.log, re.MULTILINE), srun.log


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_nodes_whose_name_resolves_to_loopback_meet_at_a_real_address(launcher, undisturbed, request):
    job = undisturbed("zero-2") if launcher == "torchrun" else request.getfixturevalue("srun")
    cluster = job.lab.cluster
    resolved = cluster.exec("node1", ["getent", "hosts", "node1"]).stdout
    assert resolved.split() == ["127.0.1.1", f"node1.{DOMAIN}", "node1"]
    address = cluster.exec("node2", ["getent", "hosts", "node1"]).stdout.split()[0]
    port = re.search(rf"rendezvous {re.escape(address)}:(\d+)$", job.log.splitlines()[0])[1]
    assert set(re.findall(r"^MASTER_ADDR: (\S+)$", job.log, re.MULTILINE)) == {address}
    assert set(re.findall(r"^MASTER_PORT: (\S+)$", job.log, re.MULTILINE)) == {port}


# Two jobs of one experiment run at the same time on the same nodes. A rank of the first job is killed, and the second
# job is cancelled.


@pytest.fixture(scope="module")
def killed_and_cancelled(lab) -> tuple[Job, Job]:
    variables = LONG | ENDLESS | {"MIN_BANDWIDTH": 0, "REQUEUE": 1}
    experiment = "deepspeed-multi-node/2_nodes"
    both = [lab.submit(experiment, **variables | lab.container(experiment)) for _ in range(2)]
    killed, cancelled = both
    try:
        for job in both:
            job.wait_for_gpus()
            job.wait_for_training()
        assert killed.kill("node2", signal.SIGKILL, "train.py", "\0RANK=1\0") == 1
        killed.wait()
        assert not cancelled.ended
        cancelled.cancel()
        cancelled.wait()
    finally:
        for job in both:
            job.cancel()
    return killed, cancelled


@pytest.mark.promise("reliability 11")
def test_a_killed_rank_ends_its_job_on_all_nodes(killed_and_cancelled):
    job, _ = killed_and_cancelled
    assert (job.state, job.code) == ("FAILED", 128 + signal.SIGKILL), str(job)
    assert (job.record["status"], job.record["exit_code"]) == ("failed", 128 + signal.SIGKILL)
    assert job.losses, "the record must keep the earlier evaluations"
    assert job.summary[0] == "status: failed (exit code 137)"
    assert job.summary[1].startswith("rank 1 on node2 ended first, with exit code 137 (killed, ")
    assert job.record["reason"] == job.summary[1]
    assert job.log.count("ended first") == 1, str(job)
    assert re.search("^rank 0 on node1 lost another rank: .*Connection", job.log, re.MULTILINE), str(job)
    assert "Traceback" not in job.log, str(job)
    assert job.processes() == {}


def test_a_cancelled_job_saves_and_is_not_requeued(killed_and_cancelled):
    _, job = killed_and_cancelled
    assert job.state == "CANCELLED", str(job)
    assert job.processes() == {}
    record = job.record
    assert (record["status"], record["exit_code"]) == ("stopped", 75), str(job)
    assert record["stop"]["checkpoint"].endswith(f"checkpoint-{record['stop']['step']}")
    assert "attempt" in record and record["restarts"] == []
    assert job.losses, "the record must keep the earlier evaluations"
    for kind, read in (("gpu", read_gpu_log), ("cpu", read_cpu_log)):
        logs = job.memory_logs(kind)
        assert set(logs) == NODES
        for path in logs.values():
            assert read(path).samples
            assert len(read(path).problems) <= 1, "only the last line may be truncated"


def test_two_jobs_of_one_experiment_have_separate_files_and_gpu_logs(killed_and_cancelled):
    """nvidia-smi shows all GPUs of a node to each of the jobs."""
    first, second = killed_and_cancelled
    assert first.folder == second.folder
    assert {path.split("/")[0] for path in first.files()} == {"log", "gpu_memory", "cpu_memory", "results"}
    assert not first.files() & second.files()
    for node in NODES:
        logged = [read_gpu_log(job.memory_logs("gpu")[node]).names() for job in (first, second)]
        assert logged == [first.gpus[node], second.gpus[node]]
        assert logged[0] != logged[1]


def submit_by_script(lab, experiment: str) -> subprocess.CompletedProcess:
    command = [f"{lab.root}/experiments/submit.sh", experiment]
    return subprocess.run(command, cwd=lab.root, env=lab.environment(), capture_output=True, text=True)


def test_submit_skips_impossible_jobs_and_warns_about_delayed_ones(lab):
    """Slurm gives the same reason for a job with too many nodes, which would never start, and for a drained node."""
    reason = "allocation failure: Requested node configuration is not available"
    never = submit_by_script(lab, "deepspeed-multi-node/6_nodes")
    script = "experiments/deepspeed-multi-node/6_nodes/deepspeed_6_nodes.slurm"
    line = f"error: {script}: Slurm refuses it: {reason}; correct the site file or the directives\n"
    assert (never.returncode, never.stdout, never.stderr) == (3, "", line)
    node = lab.cluster.nodes[-1]
    change = ["scontrol", "update", f"NodeName={node}"]
    run_command([*change, "State=DRAIN", "Reason=test"], env=lab.cluster.env)
    try:
        later = submit_by_script(lab, "deepspeed-multi-node/2_nodes")
    finally:
        run_command([*change, "State=RESUME"], env=lab.cluster.env)
    assert later.returncode == 0, later
    script = "experiments/deepspeed-multi-node/2_nodes/deepspeed_2_nodes.slurm"
    assert (
        later.stderr
        == f"warning: {script}: Slurm cannot place it now: {reason}; nodes that are down or drained: {node}\n"
    )
    run_command(["scancel", later.stdout.split()[0]], env=lab.cluster.env)


@pytest.mark.promise("the class at a glance shows each state and each failure")
def test_the_class_shows_waiting_and_running_jobs(lab, cluster, tmp_path):
    """The held job has no file, so only Slurm's queue knows it."""
    jobs = [lab.submit("baseline", **LONG | ENDLESS), lab.submit("ddp/1_gpus", sbatch=("--hold",), **LONG)]
    command = [sys.executable, "scripts/report.py", "--class", lab.root, "-o", tmp_path, "--experiments", "baseline"]
    try:
        jobs[0].wait_for_training()
        run_command([*map(str, command), "ddp/1_gpus"], cwd=lab.root, env=lab.environment())
    finally:
        for job in jobs:
            job.cancel()
    cells = re.findall(r'<td class="(running|waiting)"(.*?)</td>', (tmp_path / "class.html").read_text())
    assert [state for state, _ in cells] == ["running", "waiting"]
    assert "%<progress" in cells[0][1] and 'title="JobHeldUser"' in cells[1][1]
