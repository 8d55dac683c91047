"""The experiments as jobs on a real Slurm cluster: one of each kind, and all that can happen to a job."""

import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster import DOMAIN
from cluster import run as run_command
from jobs import ENDLESS, GIT, SHORT, Job, Lab, check_completed, directives
from reporting.memory_logs import read_cpu_log, read_gpu_log

TWO_NODES = "deepspeed-multi-node/2_nodes"
NODES = ("node1", "node2")
TOLERANCE = 1e-4  # what the order of fp32 additions may change
BRIEF = {"TRAIN_SIZE": 32, "EVAL_SIZE": 16, "NUM_EPOCHS": 1}
BAD_NAME = "x; touch pwned $(touch pwned2) `touch pwned3`"


@dataclass(frozen=True)
class Spec:
    """A job of the table: what is submitted, and what happens to it (`act`) before it ends."""

    experiment: str
    arguments: tuple = ()
    variables: dict = field(default_factory=dict)
    sbatch: tuple = ()
    act: Callable[[Job], object] | None = None

    def run(self, lab: Lab) -> Job:
        job = lab.submit(self.experiment, *self.arguments, sbatch=self.sbatch, **self.variables)
        try:
            if self.act:
                self.act(job)
            return job.wait()
        except BaseException:
            job.cancel()
            raise


def take_its_port(job: Job) -> None:
    """Listen on the port that this held job would take, then let it start."""
    listen = "import socket, sys; s = socket.socket(); s.bind(('', int(sys.argv[1]))); s.listen(); sys.stdin.read()"
    command = [*job.lab.cluster.enter("node1"), sys.executable, "-c", listen, str(first_port(job))]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as listener:
        taken = f":{first_port(job):04X} "
        job.wait_for(lambda: taken in job.lab.cluster.exec("node1", ["cat", "/proc/net/tcp"]).stdout, 60)
        job.release()
        job.wait()
        assert listener.poll() is None
        listener.stdin.close()


def first_port(job: Job) -> int:
    return 20000 + zlib.crc32(job.id.encode()) % 12000


def submit_another(job: Job) -> None:
    """The same experiment once more, at the same time on the same node."""
    job.wait_for_gpus()
    job.twin = job.lab.submit("baseline", sbatch=[f"--nodelist={node}" for node in job.gpus])
    job.twin.wait_for_gpus()
    job.wait()
    job.twin.wait()


def kill_one_rank(job: Job) -> None:
    job.wait_for_training()
    assert job.kill("node2", signal.SIGKILL, "train.py", "\0RANK=1\0") == 1
    job.wait(60)


def cancel(job: Job) -> None:
    job.wait_for_training()
    job.cancel()


def kill_logger(name: str) -> Callable[[Job], None]:
    """Ends psrecord or nvidia-smi once it has written something; the training is not near its end."""

    def act(job: Job) -> None:
        kind = {"nvidia-smi": "gpu", "psrecord": "cpu"}[name]
        job.wait_for(lambda: [log for log in job.memory_logs(kind).values() if log.read_text().count("\n") > 2])
        assert job.kill("node1", signal.SIGKILL, f"/{name}\0") == 1

    return act


def programs(lab: Lab, *names: str) -> str:
    """PATH with these of nvidia-smi and psrecord, and this Python."""
    folder = lab.root.parent / ("only " + " ".join(names))
    folder.mkdir(exist_ok=True)
    for name in names:
        target = lab.root / "tests/slurm/bin/nvidia-smi" if name == "nvidia-smi" else Path(sys.executable).parent / name
        (folder / name).exists() or (folder / name).symlink_to(target)
    wrapper(folder, f'exec "{sys.executable}" "$@"')
    return f"{folder}:/usr/bin:/bin"


def wrapper(folder: Path, body: str) -> None:
    """A `python` in folder that is a shell script."""
    (folder / "python").write_text(f"#!/bin/bash\n{body}\n")
    (folder / "python").chmod(0o755)


def ends_slowly(lab: Lab) -> Path:
    """A module that lets ranks live on for longer than srun waits for them in a cancelled job: KillWait and 2 s."""
    folder = lab.root.parent / "ends slowly"
    folder.mkdir()
    is_rank = "any(word.endswith('train.py') for word in sys.orig_argv)"
    lines = ["import atexit, sys, time", f"if {is_rank}:", "    atexit.register(time.sleep, 8)"]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return folder


def table(lab: Lab) -> dict[str, Spec]:
    same_work = SHORT | {"FP16": False, "TRAIN_SIZE": 64, "EVAL_SIZE": 32, "NUM_EPOCHS": 2, "LEARNING_RATE": 5e-3}
    bad_values = {"EXPERIMENT_NAME": BAD_NAME, "OUTPUT_DIR": "output/$(touch pwned4)"}
    hangs = lab.root.parent / "node2 hangs"
    hangs.mkdir()
    wrapper(hangs, f'if [[ ${{SLURM_NODEID:-0}} = 1 ]]; then exec sleep 600; fi\nexec "{sys.executable}" "$@"')
    return {
        # each kind as it stands; two at once
        "2 nodes": Spec(TWO_NODES),
        "baseline": Spec("baseline", act=submit_another),
        "2 gpus, its port is taken": Spec("deepspeed-multi-gpu/2_gpus", sbatch=("--hold",), act=take_its_port),
        "offload": Spec("deepspeed-single-gpu/cpu_offloading/pinned_memory"),
        "srun": Spec("deepspeed-native-launch/zero3_offload", ("--model-name", "tiny-bloom", "--steps", 4)),
        "srun 2 nodes": Spec(
            "deepspeed-native-launch/zero3_offload", ("--steps", 2), SHORT, ("--nodes=2", "--ntasks-per-node=2")
        ),
        "fast path": Spec("efficiency/all", variables=BRIEF),
        # FSDP, DDP and the custom GPT
        "fsdp 4 gpus": Spec("fsdp-strategies/hybrid_shard", variables=BRIEF),
        "fsdp 2 nodes": Spec("fsdp-multi-node/2_nodes", variables=BRIEF),
        "comparison": Spec("methods-comparison/ddp", variables=BRIEF),
        "weak scaling": Spec("custom-model/weak_scaling/2_gpus", variables=BRIEF),
        "gpt 2 nodes": Spec("custom-model/multi_node/2_nodes", variables=BRIEF),
        # 2 x 2 ranks x micro batch 1 x 4 steps, against 1 rank x 4 x 4
        "4 ranks": Spec(
            TWO_NODES,
            ("--per_device_eval_batch_size", 2),
            same_work | {"SAMPLES_PER_GPU": 16, "BATCH_SIZE": 1},
            ("--gpus-per-node=2",),
        ),
        "1 rank": Spec("baseline", ("--per_device_eval_batch_size", 8), same_work | {"BATCH_SIZE": 4}),
        # what a user gives at submission; names that a shell would execute
        "knobs": Spec(
            "deepspeed-single-gpu/zero_0",
            ("--learning_rate", "1e-4"),
            bad_values | {"TRAIN_SIZE": 48, "NUM_EPOCHS": 1, "LEARNING_RATE": "5e-3"},
            ("--job-name", BAD_NAME),
        ),
        # failures
        "wrong flag": Spec("baseline", ("--no_such_flag",)),
        "wrong flag, 2 nodes": Spec(TWO_NODES, ("--no_such_flag",)),
        "a rank is killed": Spec(TWO_NODES, variables=ENDLESS, act=kill_one_rank),
        "cancelled": Spec(TWO_NODES, variables=ENDLESS | {"PYTHONPATH": ends_slowly(lab)}, act=cancel),
        "slow network": Spec(TWO_NODES, variables={"MIN_BANDWIDTH": 1000}),
        # what node1 takes for its own address, and node2 does not
        "head not reachable": Spec(TWO_NODES, variables={"MASTER_ADDR": "127.0.0.1", "JOIN_TIMEOUT": 8}),
        "head has no address": Spec(TWO_NODES, variables={"MASTER_ADDR": f"node1.{DOMAIN}", "JOIN_TIMEOUT": 8}),
        "node2 never joins": Spec(TWO_NODES, variables={"PATH": f"{hangs}:{lab.path}", "JOIN_TIMEOUT": 8}),
        # one logger is not there, the other dies
        "no nvidia-smi": Spec(
            "baseline", variables={"PATH": programs(lab, "psrecord")}, act=kill_logger("psrecord")
        ),
        "no psrecord": Spec(
            "baseline", variables={"PATH": programs(lab, "nvidia-smi")}, act=kill_logger("nvidia-smi")
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def jobs(lab, request):
    """``jobs(name)`` is the ended job of the table; those that the selected tests use run ahead, two at a time."""
    specs = table(lab)
    wanted = {name for item in request.session.items for name in names_of(item)}
    pool = ThreadPoolExecutor(max_workers=2)
    futures = {name: pool.submit(spec.run, lab) for name, spec in specs.items() if name in wanted}
    yield lambda name: futures[name].result()
    pool.shutdown(wait=False, cancel_futures=True)
    run_command(["scancel", "--user=root"], env=lab.cluster.env, check=False)
    pool.shutdown()


def uses(*names):
    """Run the test once per named job of the table; it gets the job as its argument `job`, for a tuple several."""
    return pytest.mark.parametrize("job", names, indirect=True, ids=lambda name: str(name).replace("'", ""))


def names_of(item: pytest.Item) -> tuple:
    name = getattr(getattr(item, "callspec", None), "params", {}).get("job", ())
    return (name,) if isinstance(name, str) else name


@pytest.fixture
def job(jobs, request):
    return jobs(request.param) if isinstance(request.param, str) else tuple(map(jobs, request.param))


KINDS = ("baseline", "fast path", "offload", "2 gpus, its port is taken", "2 nodes", "srun")
KINDS += ("fsdp 4 gpus", "fsdp 2 nodes", "comparison", "weak scaling", "gpt 2 nodes")


@uses(*KINDS)
def test_each_kind_leaves_record_logs_and_summary(job: Job):
    asked = directives(job.script)
    check_completed(job, nodes=int(asked["nodes"]), gpus=int(asked["gpus-per-node"]))


STRATEGIES = {
    "fsdp 4 gpus": "FSDP2 HYBRID_SHARD",
    "fsdp 2 nodes": "FSDP2 FULL_SHARD",
    "comparison": "DDP",
    "weak scaling": "FSDP2 FULL_SHARD",
    "gpt 2 nodes": "FSDP2 FULL_SHARD",
}


@uses(*STRATEGIES)
def test_each_method_is_the_one_of_its_folder(job: Job, request):
    assert job.effective("strategy") == STRATEGIES[request.node.callspec.params["job"]]
    gpt = "custom-model" in str(job.folder)
    assert job.record["settings"]["model_name"] == ("custom-gpt" if gpt else "tiny-bloom")
    assert job.record["settings"]["labels"] == "answer"


@uses("fast path")
def test_the_fast_path_is_what_its_script_says(job: Job):
    assert (job.effective("loss"), job.effective("padding")) == ("chunked", "longest")
    assert (job.effective("sampling"), job.effective("precision")) == ("group_by_length", "bf16")
    assert (job.effective("micro batch"), job.effective("gradient accumulation")) == (16, 1)
    train = job.record["train"]
    assert 0 < train["padding_tokens"] < train["real_tokens"]
    assert train["matmul_peak_tflops"] > 0


@uses("2 nodes")
def test_bandwidth_of_a_multi_node_job_is_in_its_record(job: Job):
    bandwidth = job.record["bandwidth"]
    printed = re.search(r"^bandwidth test: bus_bandwidth_gb_per_s ([0-9.]+), ranks 2, ", job.log, re.MULTILINE)
    assert bandwidth["bus_bandwidth_gb_per_s"] == float(printed[1]) > 0
    assert (bandwidth["ranks"], bandwidth["backend"]) == (2, "gloo")
    assert bandwidth["transport"].startswith("TCP")


@uses("2 nodes", "srun 2 nodes", "4 ranks")
def test_nodes_whose_own_name_is_loopback_meet_at_the_first_ones_address(job: Job):
    assert job.state == "COMPLETED", str(job)
    assert len(set(job.record["nodes"])) == 2
    resolved = job.lab.cluster.exec("node1", ["getent", "hosts", "node1"]).stdout
    assert resolved.split() == ["127.0.1.1", f"node1.{DOMAIN}", "node1"]
    address = job.lab.cluster.exec("node2", ["getent", "hosts", "node1"]).stdout.split()[0]
    port = re.search(rf"rendezvous {re.escape(address)}:(\d+)$", job.log.splitlines()[0])[1]
    assert set(re.findall(r"^MASTER_ADDR: (\S+)$", job.log, re.MULTILINE)) == {address}
    assert set(re.findall(r"^MASTER_PORT: (\S+)$", job.log, re.MULTILINE)) == {port}


@uses("offload", "baseline")
def test_a_job_on_one_node_has_no_bandwidth(job: Job):
    assert job.record["bandwidth"] is None


@uses("srun")
def test_native_launch_takes_the_flags_of_its_document(job: Job):
    assert job.record["settings"]["model_name"] == "tiny-bloom"
    assert job.record["settings"]["max_steps"] == 4
    assert job.record["world_size"] == 2
    assert "torchrun" not in job.log
    assert "Parameter offloading: True" in job.log


@uses("baseline")
def test_two_jobs_of_one_experiment_share_no_file(job: Job):
    both = (job, job.twin)
    first, second = (one.scontrol for one in both)
    assert max(first["StartTime"], second["StartTime"]) < min(first["EndTime"], second["EndTime"]), "not at once"
    files = [one.files() for one in both]
    assert not files[0] & files[1]
    all_files = {str(path.relative_to(job.folder)) for path in job.folder.rglob("*") if path.is_file()}
    nobodys = all_files - job.files(r"(\d+|local-[\d-]+)")
    assert {path for path in nobodys if not path.endswith(".log")} == {"baseline.slurm", "log/.gitignore"}
    for one, paths in zip(both, files, strict=True):
        assert {path.split("/")[0] for path in paths} == {"log", "gpu_memory", "cpu_memory", "results", "output"}
        check_completed(one, nodes=1, gpus=1)
    assert job.losses == job.twin.losses


@uses("baseline")
def test_two_jobs_on_one_node_log_each_its_own_gpu(job: Job):
    """nvidia-smi shows both all GPUs of the node."""
    both = (job, job.twin)
    (node,) = {node for one in both for node in one.gpus}
    logged = [read_gpu_log(one.memory_logs("gpu")[""]).names() for one in both]
    assert logged == [one.gpus[node] for one in both]
    assert logged[0] != logged[1]


@uses(("1 rank", "4 ranks"))
def test_two_nodes_with_two_ranks_have_the_loss_of_one_process(job: tuple[Job, Job]):
    one, four = job
    check_completed(four, nodes=2, gpus=2)
    assert (one.record["world_size"], four.record["world_size"]) == (1, 4)
    for knob in ("precision", "global batch", "train size", "eval size"):
        assert one.effective(knob) == four.effective(knob), knob
    assert one.effective("precision") == "fp32"
    assert len(one.losses) == 2
    assert one.losses[0] - one.losses[1] > 0.05, "the loss hardly moves, so that equal losses prove nothing"
    assert four.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)


@uses("2 gpus, its port is taken")
def test_another_port_is_used_when_one_is_taken(job: Job):
    assert job.state == "COMPLETED", str(job)
    used = re.search(r"rendezvous 127\.0\.0\.1:(\d+)$", job.log.splitlines()[0])
    assert first_port(job) < int(used[1]) < first_port(job) + 10


@uses("knobs")
def test_what_is_given_at_submission_wins(job: Job):
    """Flag over variable over site over experiment over default."""
    assert job.state == "COMPLETED", str(job)
    settings = job.record["settings"]
    assert settings["learning_rate"] == 1e-4, "the flag, over the variable and the site"
    assert settings["train_size"] == 48, "the variable, over the site"
    assert settings["eval_size"] == 32, "the site, over the default"
    assert settings["save_strategy"] == "no", "the experiment, over the default"
    assert settings["weight_decay"] == 0.01, "the default"


@uses("knobs")
def test_a_shells_characters_in_names_execute_nothing(job: Job):
    assert job.state == "COMPLETED", str(job)
    assert job.log_path.name == f"{BAD_NAME}_{job.id}.out"
    assert job.record["run_name"] == BAD_NAME
    assert job.record["output_dir"] == "output/$(touch pwned4)"
    assert not list(job.lab.root.rglob("pwned*"))


@uses("wrong flag", "wrong flag, 2 nodes")
def test_a_failed_training_fails_the_job_with_its_exit_code(job: Job):
    assert (job.state, job.exit_code) == ("FAILED", 2), str(job)
    assert len(job.error_lines) == 1, str(job)
    assert job.error_lines[0].startswith("error: --no_such_flag")
    assert not job.record_path.exists()
    assert job.summary[0] == "status: failed (exit code 2)"
    assert job.summary[-1] == "missing: no run record: the job ended before the training began"
    assert job.processes() == {}


@uses("a rank is killed")
def test_a_killed_rank_ends_the_job_on_all_nodes(job: Job):
    assert (job.state, job.exit_code) == ("FAILED", 128 + signal.SIGKILL), str(job)
    assert (job.record["status"], job.record["exit_code"]) == ("failed", 128 + signal.SIGKILL)
    assert job.losses, "what was measured before is lost"
    assert "rank 1 on node2 ended first, with exit code 137" in job.log
    assert job.summary[0] == "status: failed (exit code 137)"
    assert job.processes() == {}


@uses("cancelled")
def test_a_cancelled_job_leaves_no_process_and_a_record(job: Job):
    assert job.state == "CANCELLED", str(job)
    assert job.processes() == {}
    assert (job.record["status"], job.record["exit_code"]) in [("stopped", 75), ("stopped", 143)]
    assert job.losses, "what was measured before is lost"
    for kind, read in (("gpu", read_gpu_log), ("cpu", read_cpu_log)):
        logs = job.memory_logs(kind)
        assert set(logs) == set(NODES)
        for path in logs.values():
            assert read(path).samples
            assert len(read(path).problems) <= 1, "more than a last line that is cut"


@uses("slow network")
def test_a_slow_network_ends_the_job_before_the_training(job: Job):
    assert (job.state, job.exit_code) == ("FAILED", 3), str(job)
    assert len(job.error_lines) == 1, str(job)
    error = r"error: bandwidth test: [0-9.]+ GB/s between 2 ranks, at least 1000.0 GB/s expected; "
    assert re.match(error + "set NCCL_SOCKET_IFNAME and NCCL_IB_HCA", job.error_lines[0])
    assert "knob " not in job.log
    assert not job.record_path.exists()
    assert job.processes() == {}


@uses("head not reachable", "head has no address")
def test_a_head_node_that_is_not_reached_is_named(job: Job):
    assert (job.state, job.exit_code) == ("FAILED", 3), str(job)
    head = re.search(r"rendezvous (\S+):\d+$", job.log.splitlines()[0])[1]
    assert head in ("127.0.0.1", f"node1.{DOMAIN}"), "given at submission"
    assert len(job.error_lines) == 1, str(job)
    assert job.error_lines[0].startswith(f"error: rendezvous: node2 cannot reach {head}:"), str(job)
    assert "Traceback" not in job.log, str(job)
    check_it_ended_in_time(job)


@uses("node2 never joins")
def test_a_node_that_never_joins_is_named(job: Job):
    assert (job.state, job.exit_code) == ("FAILED", 3), str(job)
    assert len(job.error_lines) == 1, str(job)
    assert job.error_lines[0].startswith("error: rendezvous: node2 did not join within 8 s; "), str(job)
    assert "Traceback" not in job.log, str(job)
    check_it_ended_in_time(job)


def check_it_ended_in_time(job: Job) -> None:
    """JOIN_TIMEOUT was 8 s; the rest is starting and ending, on a busy machine."""
    hours, minutes, seconds = map(int, job.scontrol["RunTime"].split(":"))
    assert (hours * 60 + minutes) * 60 + seconds < 200
    assert job.processes() == {}


@uses("no nvidia-smi", "no psrecord")
def test_training_goes_on_without_its_loggers(job: Job):
    assert (job.state, job.exit_code) == ("COMPLETED", 0), str(job)
    assert job.record["status"] == "completed"
    absent, dead = ("nvidia-smi", "psrecord") if job.memory_logs("cpu") else ("psrecord", "nvidia-smi")
    files = {
        "nvidia-smi": f"gpu_memory/gpu_memory_log_{job.id}.csv",
        "psrecord": f"cpu_memory/cpu_memory_log_{job.id}.txt",
    }
    assert f"missing: {absent} is not installed on node1: no {files[absent]}" in job.summary
    assert f"missing: {dead} on node1 ended before the training: its log is not complete" in job.summary
    assert files[absent] not in job.files()
    (index,) = job.gpus["node1"]
    kind = {"psrecord": "CPU memory: peak", "nvidia-smi": f"GPU {index} memory: peak"}[dead]
    assert any(line.startswith(kind) for line in job.summary), job.summary


# Without Slurm


@pytest.fixture
def bash(lab):
    """`Lab.bash`, for runs that must not outlive the test."""
    runs = []

    def start(*arguments, **variables):
        runs.append(lab.bash(*arguments, **variables))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def test_an_experiment_runs_without_slurm(lab, bash):
    """The site comes from experiments/site here."""
    (lab.root / "experiments/site").write_text("laptop\n")
    try:
        run = bash("baseline", **SHORT | {"SITE": None}).wait()
    finally:
        (lab.root / "experiments/site").unlink()
    assert run.exit_code == 0, run
    assert re.fullmatch(r"local-\d{8}-\d{6}-\d+", run.id)
    assert run.record["status"] == "completed"
    assert run.record["experiment"] == "experiments/baseline"
    assert run.losses
    assert read_gpu_log(run.memory_logs("gpu")[""]).names() == [str(index) for index in range(8)]
    assert read_cpu_log(run.memory_logs("cpu")[""]).samples
    assert run.summary[0] == "status: completed (exit code 0)"
    assert any("the GPU log holds all GPUs that nvidia-smi shows" in line for line in run.summary)
    assert run.processes() == []


def test_ranks_without_slurm_come_from_the_directives(bash):
    """The memory log is of the GPUs that they use: the first of those that the caller has chosen."""
    chosen = {"CUDA_VISIBLE_DEVICES": "1,2,3"}
    run = bash("deepspeed-native-launch/zero3_offload", "--steps", 1, **SHORT | chosen).wait()
    assert run.exit_code == 0, run
    assert run.record["world_size"] == 2
    assert read_gpu_log(run.memory_logs("gpu")[""]).names() == ["1", "2"]
    assert run.processes() == []


def test_several_nodes_need_slurm(bash):
    run = bash(TWO_NODES).wait(60)
    assert run.exit_code == 3
    assert run.error_lines == run.log.splitlines()
    assert re.fullmatch(r"error: deepspeed_2_nodes\.slurm: it needs 2 nodes, .*; .*sbatch", run.error_lines[0])


def test_a_gpu_site_without_a_gpu_ends_at_once(bash):
    run = bash("baseline", REQUIRE_GPU=1).wait()
    assert run.exit_code == 3
    assert len(run.error_lines) == 1, run
    assert re.match(r"error: GPU: PyTorch sees none on \S+; .*SITE=laptop", run.error_lines[0])
    assert not run.record_path.exists()


@pytest.mark.parametrize(
    ("experiment", "sent", "whole_group"),
    [("baseline", signal.SIGTERM, False), ("deepspeed-multi-gpu/2_gpus", signal.SIGINT, True)],
    ids=["TERM", "Ctrl-C"],
)
def test_a_stopped_run_leaves_no_process(bash, experiment, sent, whole_group):
    """A terminal sends Ctrl-C to the whole process group; `kill` signals the script alone."""
    run = bash(experiment, **ENDLESS)
    run.wait_for_training()
    os.killpg(run.popen.pid, sent) if whole_group else run.popen.send_signal(sent)
    run.wait(120)
    assert run.exit_code == 75, run
    assert run.record["status"] == "stopped"
    assert run.summary[0] == "status: stopped (exit code 75)"
    assert not any("train.py" in command or "psrecord" in command for command in run.processes())
    assert not any("ended before the training" in line for line in run.summary)


# submit.sh


@pytest.fixture
def own_lab(cluster, tmp_path):
    """A copy of the repository that a test may edit, with a family of two experiments that a user added."""
    lab = Lab(tmp_path, cluster)
    for name in ("first", "second"):
        shutil.copytree(lab.script("deepspeed-single-gpu/zero_0").parent, lab.root / "experiments/my own" / name)
    yield lab
    for line in queue(lab):
        cluster.cancel(line.split()[0])


def queue(lab: Lab) -> list[str]:
    """Jobs that were submitted from this copy and have not ended: id and folder."""
    lines = run_command(["squeue", "--noheader", "--format=%i %Z"], env=lab.cluster.env).stdout.splitlines()
    return [line for line in lines if f" {lab.root}/" in line]


def commit(lab: Lab) -> str:
    """Commit everything; returns the commit."""
    for arguments in (["add", "-A"], ["commit", "-qm", "edit"]):
        run_command([*GIT, *arguments], cwd=lab.root)
    return run_command([*GIT, "rev-parse", "HEAD"], cwd=lab.root).stdout.strip()


def test_a_chain_of_jobs_runs_the_code_of_its_submission(own_lab):
    before = commit(own_lab)
    partition = ["scontrol", "update", "PartitionName=main"]
    run_command([*partition, "State=DOWN"], env=own_lab.cluster.env)  # jobs queue and wait
    try:
        done = own_lab.submit_sh("--chain", "--snapshot", "my own", **SHORT)
        assert done.returncode == 0, done.stderr
        lines = [line.split("  ") for line in done.stdout.splitlines()]
        folders = [f"experiments/my own/{name}" for name in ("first", "second")]
        assert [path for _, path in lines] == [f"{folder}/deepspeed_zero0.slurm" for folder in folders]
        jobs = [Job(own_lab, own_lab.root / path, number, "submit.sh") for number, path in lines]
        assert jobs[1].scontrol["Dependency"].startswith(f"afterany:{jobs[0].id}")
        (own_lab.root / "scripts/train.py").write_text("raise SystemExit(99)")
        (own_lab.root / "ds_configs/zero0.json").write_text("{")
        assert commit(own_lab) != before
    finally:
        run_command([*partition, "State=UP"], env=own_lab.cluster.env)
    for job, folder in zip(jobs, folders, strict=True):
        job.wait()
        assert (job.state, job.exit_code) == ("COMPLETED", 0), str(job)
        assert job.record["git"] == {"commit": before, "dirty": False}
        assert job.record["experiment"] == folder
        assert {path.split("/")[0] for path in job.files()} == {"log", "gpu_memory", "cpu_memory", "results"}
    assert jobs[0].scontrol["EndTime"] <= jobs[1].scontrol["StartTime"]


# What takes a minute


@pytest.mark.experiments
def test_a_job_at_its_time_limit_says_so(lab):
    job = lab.submit("baseline", sbatch=("--time=00:01:00",), **ENDLESS).wait()
    assert job.state == "TIMEOUT", str(job)
    assert job.processes() == {}
    assert job.record["status"] == "timeout"
    assert job.losses


@pytest.mark.experiments
def test_a_killed_rank_of_bare_srun_ends_the_others(lab):
    job = lab.submit("deepspeed-native-launch/zero3_offload", **ENDLESS)
    job.wait_for_training()
    assert job.kill("node1", signal.SIGKILL, "train.py", "SLURM_PROCID=1\0", "/python\0") == 1
    job.wait(60)
    assert (job.state, job.exit_code) == ("FAILED", 137), str(job)
    assert job.record["status"] == "failed"
    assert job.processes() == {}
