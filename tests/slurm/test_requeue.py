"""Jobs that are stopped on a real cluster, whatever by, and that Slurm starts again: they end as if nothing had been.

On the CPU the result is the same to the last bit: weights, losses of every epoch, mean of the training losses.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from jobs import STEPS_PER_EPOCH, TRAININGS, Job, Lab, run_command

EARLIEST = 6  # seconds behind an attempt in which a node refuses the next one: cred_expire of the cluster


def warn(job: Job) -> None:
    """What Slurm sends some time before the limit: --signal=B:USR1@120."""
    run_command(["scancel", "--batch", "--signal=USR1", job.job_id], env=job.lab.cluster.env)


def requeue(job: Job) -> None:
    """Preemption, with PreemptMode=REQUEUE."""
    run_command(["scontrol", "requeue", job.job_id], env=job.lab.cluster.env)


def crash(node: str) -> Callable[[Job], None]:
    """It stays down until Slurm has noticed, and has put the job back into its queue."""

    def act(job: Job) -> None:
        job.lab.cluster.crash(node)
        job.until(lambda: job.scontrol["Restarts"] != "0" and not job.processes())
        # Slurm would start it as soon as it can, which a node refuses so early
        run_command(["scontrol", "update", f"JobId={job.job_id}", f"StartTime=now+{EARLIEST}"], env=job.lab.cluster.env)
        job.lab.cluster.start(node)

    return act


@dataclass(frozen=True)
class Stopped:
    """A job, what happens to it, and what its record tells of that. clean: a checkpoint was saved at the stop."""

    name: str
    act: Callable[[Job], object] | None
    reason: str
    clean: bool = True
    sbatch: tuple = ()
    variables: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {getattr(self.act, '__qualname__', 'time limit').split('.')[0]}"


# the other node's rank, or Slurm's end of the job, may have come before
KILLED = r"node failure on node\d|ended without a word: .*|(failed|stopped).*"
CASES = [
    Stopped("zero-2", warn, r"stopped by SIGUSR1 \(exit code 75\)"),
    Stopped("fsdp2", crash("node2"), KILLED, clean=False),
]
# What differs from these in the place of the fault, or in what asks for the stop
MORE = [
    Stopped("plain", warn, r"stopped by SIGUSR1 \(exit code 75\)"),
    Stopped("fsdp2", warn, r"stopped by SIGUSR1 \(exit code 75\)"),
    Stopped("plain", requeue, r"stopped by SIGTERM \(exit code 75\)"),
    Stopped("zero-2", requeue, r"stopped by SIGTERM \(exit code 75\)"),
    Stopped("fsdp2", requeue, r"stopped by SIGTERM \(exit code 75\)"),
    Stopped("plain", crash("node1"), KILLED, clean=False, sbatch=("--nodelist=node1",)),
    Stopped("zero-2", crash("node1"), KILLED, clean=False),
    Stopped("fsdp2", crash("node1"), KILLED, clean=False),
    Stopped("zero-2", crash("node2"), KILLED, clean=False),
    # half a minute of warning within Slurm's shortest limit
    Stopped("plain", None, r"stopped by SIGUSR1 \(exit code 75\)", sbatch=("--time=1", "--signal=B:USR1@30"),
            variables={"NUM_EPOCHS": 60}),
]  # fmt: skip


def last_step(job: Job) -> int:
    return max(map(int, re.findall(r"^step (\d+) of", job.log, re.MULTILINE)), default=0)


def check(case: Stopped, job: Job) -> None:
    """It was stopped once, went on, and lost no more than it may."""
    job.until(lambda: last_step(job) > STEPS_PER_EPOCH + 1)
    if case.act:
        case.act(job)
    job.until(lambda: "resuming from step" in job.log)
    attempt = job.log.count(f"job {job.job_id} of ")
    if case.name in ("zero-2", "fsdp2"):  # Slurm may still be telling a node to end a step of an earlier attempt
        assert job.kill("node1", 0, f"SLURM_STEP_ID={2 * attempt - 1}\0"), f"another step than its own\n{job}"
    job.wait()
    assert (job.state, job.code) == ("COMPLETED", 0), str(job)
    record = job.record
    assert (record["status"], record["exit_code"]) == ("completed", 0), str(job)
    # a slow machine may need the shortest limit twice
    assert record["attempt"] == 2 or (case.act is None and record["attempt"] > 2), str(job)
    assert len(record["restarts"]) == record["attempt"] - 1
    first, *others = [restart["reason"] for restart in record["restarts"]]
    assert re.fullmatch(case.reason, first)
    # a warning that comes behind the last step ends the run at once
    assert all(re.fullmatch(rf"{case.reason}|stopped \(exit code 138\)", reason) for reason in others), others
    restart = record["restarts"][0]
    before, _, after = job.log.partition("resuming from step ")
    resumed = int(re.match(r"\d+", after)[0])
    reached = max(map(int, re.findall(r"^step (\d+) of", before, re.MULTILINE)))
    assert resumed == restart["step"]
    assert resumed >= (reached if case.clean else reached - STEPS_PER_EPOCH)
    assert not (job.folder / "results" / f".{job.job_id}").exists()
    assert job.processes() == {}
    attempts = job.log.count(f"job {job.job_id} of ")  # one that the warning ended before the training has no record
    for log in [*job.memory_logs("cpu").values(), *job.memory_logs("gpu").values()]:
        headers = re.findall(r"^(?:# +Elapsed|timestamp)", log.read_text(), re.MULTILINE)
        assert len(headers) == attempts, f"{log}: all attempts are in one log"


def check_equal(job: Job, expected: Job) -> None:
    assert job.record["train"]["steps"] == expected.record["train"]["steps"]
    weights = [(each.folder / "output" / each.job_id / "model.safetensors").read_bytes() for each in (job, expected)]
    assert weights[0] == weights[1], f"other weights\n{job}"
    assert job.losses == expected.losses
    for name in ("loss_mean", "loss_last"):
        assert job.record["train"][name] == expected.record["train"][name], name


def run(case: Stopped, lab: Lab) -> Job:
    experiment, flags, knobs = TRAININGS[case.name]
    job = lab.submit(experiment, *flags, sbatch=case.sbatch, **(knobs | {"REQUEUE": 1} | case.variables))
    check(case, job)
    return job


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stopped_job_goes_on_as_if_nothing_had_been(case, lab, undisturbed):
    check_equal(run(case, lab), undisturbed(case.name))


@pytest.mark.faults
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_jobs_that_are_stopped(case, lab, undisturbed):
    job = run(case, lab)
    if "NUM_EPOCHS" not in case.variables:
        check_equal(job, undisturbed(case.name))
