"""Tests of jobs that are stopped on a real cluster in several ways, requeued by Slurm, and resumed.

On the CPU the result is bitwise equal to that of an undisturbed job: weights, losses of every epoch, and mean of the
training losses. Only a job that continues on another number of nodes rounds differently.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from helpers import RUN_TIMEOUT, snapshot, until
from job.memory_logs import read_cpu_log
from jobs import STEPS_PER_EPOCH, TRAININGS, Job, run_command

ROUNDING = 1e-5  # difference of a loss in fp32 on another number of ranks
NODE_DELAY = 6  # seconds after which a node accepts the next attempt (see cred_expire in cluster.py)


def warn(job: Job) -> None:
    """Send the signal that Slurm sends before the time limit with --signal=B:USR1@120."""
    run_command(["scancel", "--batch", "--signal=USR1", job.job_id], env=job.lab.cluster.env)


def requeue(job: Job) -> None:
    """Requeue the job, as a preemption with PreemptMode=REQUEUE does."""
    run_command(["scontrol", "requeue", job.job_id], env=job.lab.cluster.env)


def update(job: Job, *values: str) -> None:
    run_command(["scontrol", "update", f"JobId={job.job_id}", *values], env=job.lab.cluster.env)


def crash_and_wait(job: Job, node: str) -> None:
    """Crash the node, and return after Slurm has requeued the job."""
    job.lab.cluster.crash(node)
    job.until(lambda: job.scontrol["Restarts"] != "0" and not job.processes())
    # Delay the start, because a node rejects an attempt that comes too early
    update(job, f"StartTime=now+{NODE_DELAY}")


def crash(node: str) -> Callable[[Job], None]:
    """Return a function that crashes the node and starts it again after Slurm has requeued the job."""

    def act(job: Job) -> None:
        crash_and_wait(job, node)
        job.lab.cluster.start(node)

    return act


def reach_time_limit(job: Job) -> None:
    """Lower the time limit, so that Slurm warns the job within a minute. The next attempt has half an hour."""
    hours, minutes, _ = map(int, job.scontrol["RunTime"].split(":"))
    update(job, f"TimeLimit={60 * hours + minutes + 2}")
    job.until(lambda: job.scontrol["Restarts"] != "0")
    update(job, "TimeLimit=30")


@dataclass(frozen=True)
class StopCase:
    """A job, the action that stops it, and the reason in its record. clean: the job saves a checkpoint at the stop."""

    name: str
    act: Callable[[Job], object]
    reason: str
    clean: bool = True
    sbatch: tuple = ()
    contained: bool = False  # the job runs in a container, the job that it is compared with does not
    variables: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.act.__qualname__.split('.')[0]}"


# The record of a job on a crashed node may have another reason: a rank on the other node failed first, or Slurm ended
# the job
KILLED = r"node failure on node\d|rank \d on node\d ended first, .*|ended without a word: .*|(failed|stopped).*"
CASES = [
    StopCase("zero-2", warn, r"stopped by SIGUSR1 \(exit code 75\)", contained=True),
    StopCase("fsdp2", crash("node2"), KILLED, clean=False),
]
# More cases, with other nodes that crash and other reasons for the stop
MORE = [
    StopCase("plain", warn, r"stopped by SIGUSR1 \(exit code 75\)"),
    StopCase("fsdp2", warn, r"stopped by SIGUSR1 \(exit code 75\)"),
    StopCase("fsdp2-lora", warn, r"stopped by SIGUSR1 \(exit code 75\)"),
    StopCase("plain", requeue, r"stopped by SIGTERM \(exit code 75\)"),
    StopCase("zero-2", requeue, r"stopped by SIGTERM \(exit code 75\)"),
    StopCase("fsdp2", requeue, r"stopped by SIGTERM \(exit code 75\)"),
    StopCase("plain", crash("node1"), KILLED, clean=False, sbatch=("--nodelist=node1",)),
    StopCase("zero-2", crash("node1"), KILLED, clean=False),
    StopCase("fsdp2", crash("node1"), KILLED, clean=False),
    StopCase("zero-2", crash("node2"), KILLED, clean=False),
    StopCase("plain", reach_time_limit, r"stopped by SIGUSR1 \(exit code 75\)", sbatch=("--signal=B:USR1@60",),
            variables={"NUM_EPOCHS": 120}),
]  # fmt: skip


def last_step(job: Job) -> int:
    return max(map(int, re.findall(r"^step (\d+) of", job.log, re.MULTILINE)), default=0)


def check_restart(case: StopCase, job: Job) -> None:
    """Check that the job is stopped, resumes, and repeats no more steps than allowed."""
    job.until(lambda: last_step(job) > STEPS_PER_EPOCH + 1)
    case.act(job)
    job.until(lambda: "resuming from step" in job.log)
    attempt = job.log.count(f"job {job.job_id} of ")
    if case.name != "plain":  # Slurm may still be ending a step of an earlier attempt on a node
        assert job.kill("node1", 0, f"SLURM_STEP_ID={2 * attempt - 1}\0"), f"the step is not this attempt's\n{job}"
    job.wait()
    assert (job.state, job.code) == ("COMPLETED", 0), str(job)
    record = job.record
    assert (record["status"], record["exit_code"]) == ("completed", 0), str(job)
    assert record["attempt"] == 2, str(job)
    (restart,) = record["restarts"]
    assert re.fullmatch(case.reason, restart["reason"])
    before, _, after = job.log.partition("resuming from step ")
    resumed = int(re.match(r"\d+", after)[0])
    reached = max(map(int, re.findall(r"^step (\d+) of", before, re.MULTILINE)))
    assert resumed == restart["step"]
    assert resumed >= (reached if case.clean else reached - STEPS_PER_EPOCH)
    assert not (job.folder / "results" / f".{job.job_id}").exists()
    assert job.processes() == {}
    attempts = job.log.count(f"job {job.job_id} of ")  # an attempt that ended before the training is not in the record
    for log in [*job.memory_logs("cpu").values(), *job.memory_logs("gpu").values()]:
        headers = re.findall(r"^(?:# +Elapsed|timestamp)", log.read_text(), re.MULTILINE)
        assert len(headers) == attempts, f"{log} must hold all attempts"


def check_equal(job: Job, expected: Job) -> None:
    assert job.record["train"]["steps"] == expected.record["train"]["steps"]
    weights = [(each.folder / "output" / each.job_id / "model.safetensors").read_bytes() for each in (job, expected)]
    assert weights[0] == weights[1], f"the weights differ\n{job}"
    assert job.losses == expected.losses
    for node, log in expected.memory_logs("cpu").items():  # psrecord measures a container from outside
        peaks = [read_cpu_log(path).peak("process") for path in (log, job.memory_logs("cpu")[node])]
        assert peaks[1] == pytest.approx(peaks[0], rel=0.1)
    for name in ("loss_mean", "loss_last"):
        assert job.record["train"][name] == expected.record["train"][name], name


@pytest.mark.promise("reliability 9", "a container: outside, a job needs two packages")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.faults) for each in MORE)], ids=str)
def test_a_stopped_job_is_requeued_and_resumes_exactly(case, lab, undisturbed):
    experiment, flags, knobs = TRAININGS[case.name]
    contained = lab.container(experiment) if case.contained else {}
    job = lab.submit(experiment, *flags, sbatch=case.sbatch, **(knobs | {"REQUEUE": 1} | contained | case.variables))
    check_restart(case, job)
    if "NUM_EPOCHS" not in case.variables:
        check_equal(job, undisturbed(case.name))
    if case.contained and not contained:
        pytest.skip("passed without a container, because there is no ch-run (charliecloud-runtime)")
    assert job.record["container"] == contained.get("CONTAINER")
    assert job.log.count(f"\ncontainer: {job.record['container']}\n") == 2 * case.contained, "one for each attempt"


@pytest.mark.promise("reliability 9")
def test_a_completed_job_that_slurm_starts_again_stays_completed(undisturbed):
    job = undisturbed("zero-2")
    log, before = job.log, snapshot(job.folder / "results", job.output)
    requeue(job)
    until(lambda: job.log != log, RUN_TIMEOUT)
    job.wait()
    log += f"results/{job.job_id}.json: completed before Slurm started this job again, so nothing is left to do\n"
    after = snapshot(job.folder / "results", job.output)
    assert (job.state, job.code, job.log, after) == ("COMPLETED", 0, log, before), str(job)


@pytest.mark.faults
@pytest.mark.promise("reliability 9")
@pytest.mark.parametrize("range_given", [True, False])
def test_a_job_continues_on_the_node_that_is_left(range_given, editable_lab, undisturbed):
    """One of two nodes crashes and stays down. docs/reliability.md has the same two ways to continue on one node.

    range_given: the job requests one or two nodes. Otherwise it requests two, and is changed while it waits.
    """
    experiment, flags, knobs = TRAININGS["fsdp2"]
    expected, cluster = undisturbed("fsdp2"), editable_lab.cluster
    nodes = ("--nodes=1-2",) if range_given else ()
    if range_given:  # with a number of tasks per node, Slurm starts the job on one node, although two are free
        script = editable_lab.script(experiment)
        script.write_text(re.sub(r"#SBATCH --ntasks-per-node.*\n", "", script.read_text()))
    job = editable_lab.submit(experiment, *flags, sbatch=("--requeue", *nodes), **knobs)
    try:
        job.until(lambda: last_step(job) > STEPS_PER_EPOCH + 1)
        crash_and_wait(job, "node2")
        if not range_given:
            update(job, "NumNodes=1", "NumTasks=1", "NumCPUs=4")
        job.wait()
    finally:
        job.cancel()
        if not cluster.pid("node2"):
            cluster.start("node2")
    assert (job.state, job.code) == ("COMPLETED", 0), str(job)
    record = job.record
    assert (record["status"], record["attempt"], record["world_size"]) == ("completed", 2, 1), str(job)
    assert re.fullmatch(KILLED, record["restarts"][0]["reason"])
    assert (record["nodes"], record["overrides"]) == (["node1"], ["nodes: 1 instead of 2"])
    assert record["knobs"]["gradient accumulation"] == {"requested": 1, "effective": 2}
    assert record["knobs"]["global batch"] == {"requested": 8, "effective": 8}
    step = record["restarts"][0]["step"]
    assert step % STEPS_PER_EPOCH == 0
    assert f"resuming from step {step}: output/{job.job_id}/checkpoint-{step}\nresuming on 1 rank(s), " in job.log
    changed = r"^gradient accumulation +1 +2 +keeps the global batch of the checkpoint on 1 rank\(s\)$"
    assert len(re.findall(changed, job.log, re.MULTILINE)) == 1, str(job)
    for name in ("steps", "real_tokens", "counted_tokens"):  # the questions are the same
        assert record["train"][name] == expected.record["train"][name], name
    assert len(expected.step_losses) == expected.record["train"]["steps"]
    assert job.step_losses == pytest.approx(expected.step_losses, abs=ROUNDING, rel=0)
    assert job.losses == pytest.approx(expected.losses, abs=ROUNDING, rel=0)
    assert job.processes() == {}
    assert not (job.folder / "results" / f".{job.job_id}").exists()
