"""Tests of experiments/watch.sh on runs without Slurm, and of report.py --job with an id.

tests/slurm/test_watch.py tests both on a cluster.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import until
from report_files import add_run, write
from shell import program, shell_environment, start_stub

# The lines of a training, which then waits for the file `go`
TRAINING = """
import os, time
print("resuming from step 10 of output/1/checkpoint-10")
print("step 20 of 200 (10 %) after 100 s")
print({"loss": "7.25", "grad_norm": "1.5", "epoch": "1"})
print({"eval_loss": "6.5", "eval_runtime": "1", "epoch": "1"})
print("step 40 of 200 (20 %) after 110 s")
print({"loss": "7.125", "grad_norm": "1.5", "epoch": "2"})
print({"eval_loss": "6.25", "eval_runtime": "1", "epoch": "2"})
print("error: disk: it is nearly full; " + "free some space " * 8, flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""
ID = "local-20261120-101010-7"


@pytest.fixture
def watch(workshop, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run watch.sh. squeue: lines of a stub for squeue; otherwise no Slurm is in reach."""

    def run(*arguments: str, squeue: str = "", **variables: object) -> subprocess.CompletedProcess:
        path = os.environ["PATH"]
        if squeue:
            path = f"{program(tmp_path / 'bin', 'squeue', squeue).parent}:{path}"
        command = [f"{workshop}/experiments/watch.sh", *arguments]
        environment = shell_environment(PATH=path, **variables)
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def running(workshop) -> Iterator[Path]:
    """The folder of a run without Slurm whose training waits."""
    folder = workshop / "experiments/mine/x"
    started = start_stub(folder, TRAINING, JOB_ID=ID, CUDA_VISIBLE_DEVICES="3")
    log = folder / f"log/1_{ID}.out"
    try:
        until(lambda: log.exists() and "error: disk" in log.read_text() and list(folder.glob("gpu_memory/*")))
        until(lambda: (folder / f"cpu_memory/cpu_memory_log_{ID}.txt").read_text().count("\n") > 1)
        until(lambda: "\n" in (folder / f"results/.{ID}/gpu_load_{os.uname().nodename}").read_text())
        yield folder
        (folder / "go").touch()
        started.communicate(timeout=120)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)


def test_a_run_without_slurm_is_shown(running, watch):
    done = watch("--once", ID)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"job {ID} in experiments/mine/x", "running"]
    assert re.fullmatch(rf"log        log/1_{ID}.out, last line \d+ s ago", lines[2])
    assert lines[3:6] == [
        "step       40 of 200 (20 %), 2 steps/s, about 1:20 min left",
        "loss       7.125",
        "eval loss  6.5 6.25",
    ]
    assert " ".join(line.strip() for line in lines[6:9]).startswith("error: disk: it is nearly full; free some")
    assert max(map(len, lines)) <= 80
    host = os.uname().nodename
    cpu, gpu = lines[-2:]
    assert re.fullmatch(rf"{host} +CPU +\d+ +\d+ % of one core", cpu), done
    assert re.fullmatch(rf"{host} +GPU 3 +\d+ of 32768 +93 %", gpu), done


def read_log(folder: Path) -> str:
    return (folder / f"log/1_{ID}.out").read_text()


def test_only_the_last_attempt_is_shown(running, watch):
    """The log of a job that Slurm restarts holds all attempts."""
    log, text = running / f"log/1_{ID}.out", read_log(running)
    earlier = text.replace("step 40 of", "step 180 of") + "\nstatus: stopped (exit code 75)\n"
    log.write_text(earlier + text.partition("resuming")[0] + "reading data\n")
    view = watch(ID).stdout
    assert "\nlast line  reading data\n" in view and "180" not in view and "status" not in view, view
    log.write_text(earlier + text[: text.index("{'loss'")])
    assert "\nstep       20 of 200 (10 %), 0.1 steps/s, about 30:00 min left\n" in watch(ID).stdout


def test_an_ended_run_is_shown_with_its_summary(stub, watch):
    _, folder = stub(TRAINING.partition("while")[0], JOB_ID=ID)
    done = watch()  # the newest log, because no job is in a queue
    summary = "status: completed (exit code 0)"
    assert done.stdout.startswith(f"job {ID} in experiments/mine/x\nended, {summary}\n"), done
    shown = done.stdout[done.stdout.index(f"\n\n{summary}\n") :].split()
    assert shown == re.search(r"^status: [^=]*", read_log(folder), re.MULTILINE)[0].split(), done
    log = folder / f"log/1_{ID}.out"
    log.write_text(read_log(folder).partition("=====")[0])
    assert "\nended, without a summary: see the end of its log\n" in watch(ID).stdout


def test_a_job_is_shown_although_slurm_does_not_answer(workshop, watch):
    write(workshop / "experiments/mine/x/log/x_4711.out", "job 4711 of experiments/mine/x: site laptop\nnodes: n1\n")
    view = watch("4711", squeue="echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1").stdout
    assert "\nunknown: Slurm does not answer\n" in view and "\nlast line  nodes: n1\n" in view
    view = watch("4711", squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1").stdout
    assert "\nended, without a summary: see the end of its log\n" in view


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["4711"], "4711: no job in Slurm's queue and no log in experiments/ has this id; squeue --me lists your jobs"),
        (["a b"], "a b: this is not the id of a job; give the number that sbatch printed, or local-... of a run"),
        ([], "watch.sh: this is not the id of a job; "),
        (["1", "2"], "2: only one job is allowed; see --help"),
        (["--twice", "1"], "--twice: unknown option; see --help"),
    ],
)
def test_a_mistake_is_one_line(arguments, error, watch):
    done = watch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {error}") and done.stderr.count("\n") == 1, done


# report.py --job with an id


@pytest.fixture
def report(workshop) -> Callable[..., subprocess.CompletedProcess]:
    def run(job: str, cwd: Path = workshop) -> subprocess.CompletedProcess:
        command = [sys.executable, f"{workshop}/scripts/report.py", "--job", job]
        return subprocess.run(command, cwd=cwd, env=shell_environment(), capture_output=True, text=True, timeout=120)

    return run


def test_an_id_finds_its_record_below_experiments_and_in_the_current_folder(workshop, tmp_path, report):
    folder = add_run(workshop, "ddp/2_gpus", "4711")
    done = report("4711")
    assert "Baseline summary of 4711 (completed, tiny-bloom)" in done.stdout, done
    assert done.stdout.endswith("run record: experiments/ddp/2_gpus/results/4711.json\n")
    assert report("results/4711.json", folder).stdout.endswith("run record: results/4711.json\n")
    elsewhere = add_run(tmp_path, "mine", "4712")
    assert report("4712", elsewhere).stdout.endswith("run record: results/4712.json\n")
    add_run(workshop, "baseline", "4711")
    both = "experiments/baseline/results/4711.json, experiments/ddp/2_gpus/results/4711.json"
    line = f"error: --job: 2 runs have the id 4711: {both}; give the path of one\n"
    assert (report("4711").returncode, report("4711").stderr) == (2, line)


def test_a_job_without_a_record_is_one_line(workshop, report):
    line = "error: --job: no run has the id 4711; give a job id, or the path of results/<job_id>.json\n"
    assert (report("4711").returncode, report("4711").stderr) == (2, line)
    log = workshop / f"experiments/mine/x/log/x_{ID}.out"
    write(log, "error: DATASET: no such file; correct it\n\nstatus: failed (exit code 2)\n")
    line = f"error: --job: {ID} ended without a run record: error: DATASET: no such file; correct it; its log is "
    done = report(ID)
    assert (done.returncode, done.stderr) == (2, f"{line}experiments/mine/x/log/x_{ID}.out\n")


def test_a_run_that_has_no_record_yet_is_one_line(running, report):
    done = report(ID)
    line = f"error: --job: {ID} has no run record yet: its state is running; experiments/watch.sh {ID} shows when"
    assert done.returncode == 2 and done.stderr.startswith(line), done
