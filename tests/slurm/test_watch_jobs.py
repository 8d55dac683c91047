"""Tests of experiments/watch.sh and report.py --job on a job of two nodes that runs, and on a job that waits."""

import fcntl
import os
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from cluster import run as run_command
from helpers import RUN_TIMEOUT, until
from jobs import ENDLESS, TWO_NODES, Job, Lab

REDRAWN = "\x1b[H"  # each view begins at the first line of the terminal
ROWS, WIDTH = 9, 80  # size of the terminal; the view of a running job has 12 lines


@pytest.fixture(scope="module")
def running(lab) -> Iterator[Job]:
    """A job of two nodes with minutes of training, which has logged some of its steps."""
    knobs = TWO_NODES | {"SAVE_STRATEGY": "no", "SAMPLES_PER_GPU": 48, "NUM_EPOCHS": 200}
    job = lab.submit("deepspeed-multi-node/2_nodes", **knobs)
    try:
        job.wait_for_gpus()
        job.until(lambda: job.log.count("\nstep ") > 1)
        yield job
    finally:
        job.cancel()


@pytest.fixture
def waiting(lab) -> Iterator[Job]:
    job = lab.submit("baseline", sbatch=("--hold",), **ENDLESS)
    yield job
    job.cancel()


def watch(lab: Lab, *arguments: str) -> str:
    return run_command([f"{lab.root}/experiments/watch.sh", *arguments], cwd="/", env=lab.environment()).stdout


def report(lab: Lab, job_id: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/report.py", "--job", job_id]
    return subprocess.run(command, cwd=lab.root, env=lab.environment(), capture_output=True, text=True, check=False)


class Terminal:
    """watch.sh in a terminal of its own, as a participant starts it."""

    def __init__(self, lab: Lab, job_id: str):
        self.end, terminal = os.openpty()
        termios.tcsetwinsize(terminal, (ROWS, WIDTH))
        self.process = subprocess.Popen(
            [f"{lab.root}/experiments/watch.sh", job_id],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=lab.environment(),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes SIGINT
        )
        os.close(terminal)
        self.text = ""

    def read(self) -> str:
        """Return all output so far."""
        while select.select([self.end], [], [], 0)[0]:
            try:
                self.text += os.read(self.end, 65536).decode()
            except OSError:  # the program has closed the terminal
                break
        return self.text

    def until(self, condition) -> None:
        until(condition, RUN_TIMEOUT, lambda: self.process.poll() is not None and not condition(), self.read())


def test_without_an_id_the_newest_job_of_the_queue_is_shown(running, waiting):
    assert watch(running.lab).startswith(f"job {waiting.job_id} in experiments/baseline\nPENDING (JobHeldUser)\n")


@pytest.mark.promise("watching a job neither stops it nor takes a step number")
def test_ctrl_c_ends_the_view_and_not_the_job(running):
    terminal = Terminal(running.lab, running.job_id)
    terminal.until(lambda: terminal.read().count(REDRAWN) > 1)
    os.write(terminal.end, b"\x03")  # Ctrl-C
    assert terminal.process.wait(timeout=RUN_TIMEOUT) == 0
    view = terminal.read().split(REDRAWN)[1].splitlines()
    assert view[-1].endswith(f"/experiments/watch.sh --once {running.job_id} prints all lines\x1b[J"), view
    assert len(view) < ROWS, "a longer view would scroll, and the next one would not cover it"
    evaluations = running.log.count("'eval_loss'")
    running.until(lambda: running.log.count("'eval_loss'") > evaluations)
    assert (running.scontrol["JobState"], "SIGINT" in running.log) == ("RUNNING", False)


@pytest.mark.promise("watching a job neither stops it nor takes a step number")
def test_watching_takes_no_step_number_of_the_job(running):
    """Slurm ends a step of a restarted job that has the number of an old step (prepare in run_job.py)."""
    watch(running.lab, "--once", running.job_id)
    command = ["srun", "--overlap", f"--jobid={running.job_id}", "--nodes=1", "--ntasks=1", "printenv", "SLURM_STEP_ID"]
    after_test_and_training = "2"
    assert run_command(command, cwd="/", env=running.lab.environment()).stdout.strip() == after_test_and_training


@pytest.mark.promise("a running or waiting job shows what is known")
def test_the_report_of_a_running_job_shows_what_is_known(running):
    done = report(running.lab, running.job_id)
    assert done.returncode == 0, done
    assert re.search(
        rf"Summary of {running.job_id}: \S+ \(running: step \d+ of 2400, loss [\d.]+, tiny-bloom\)", done.stdout
    )
    rows = dict(re.findall(r"^\| (.*?) +\| +([\d.,]+) ", done.stdout, re.MULTILINE))
    epoch = re.search(r"Eval Loss \(Epoch (\d+)\)", done.stdout)[1]  # a long training shows its last epochs
    loss = float(rows[f"Eval Loss (Epoch {epoch})"])
    assert loss == pytest.approx(running.losses[int(epoch) - 1], abs=1e-3)
    assert {"Peak GPU memory (MiB)", "Peak CPU memory (MiB)"} <= set(rows), done.stdout


@pytest.mark.promise("a running or waiting job shows what is known")
def test_a_waiting_job_shows_its_reason(waiting):
    view = watch(waiting.lab, "--once", waiting.job_id)
    assert view == f"job {waiting.job_id} in experiments/baseline\nPENDING (JobHeldUser)\nlog        none yet\n"
    done = report(waiting.lab, waiting.job_id)
    assert (done.returncode, done.stdout) == (2, "")
    line = f"error: --job: no run record has the id {waiting.job_id}; experiments/watch.sh {waiting.job_id} shows "
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1, done


def test_the_view_of_a_job_that_ends_ends(running):
    terminal = Terminal(running.lab, running.job_id)
    terminal.until(lambda: "RUNNING" in terminal.read())
    running.cancel()
    assert terminal.process.wait(timeout=RUN_TIMEOUT) == 0
    last = terminal.read().split(REDRAWN)[-1]
    assert "ended, status: stopped (exit code 75)" in last, last
