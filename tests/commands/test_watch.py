"""Tests of experiments/watch.sh on runs without Slurm, and of report.py --job with an id.

tests/slurm/test_watch_jobs.py tests both on a cluster.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import until
from report_files import CPU_HEADER, GPU_HEADER, add_run, cpu_log, gpu_log, write
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
# Stubs of squeue
NOT_IN_THE_QUEUE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
RUNNING = "echo '4711|RUNNING|None|node[1-3]|2:01|57:59|N/A|/w'"
PENDING = "echo '4711|PENDING|Resources||0:00|1:00:00|N/A|/w'"
# The log of a job that runs, and lines that it may have at its end
LOG = """job 4711 of experiments/mine/x: site a, 3 node(s) x 1 rank(s)
nodes: node1 node2 node3
step 40 of 800 (5 %) after 10 s
{'loss': '7.125', 'epoch': '1'}
step 120 of 800 (15 %) after 20 s
"""
STOPPED = "stopped by SIGTERM at step 135 of 800; resume with --resume_from_checkpoint output/4711/checkpoint-135\n"
STEP = "\nstep       120 of 800 (15 %), 8 steps/s"  # in the view


def ended(status: str) -> str:
    return f"\n{'=' * 60}\nstatus: {status}\n{'=' * 60}\n"


@pytest.fixture
def watch(workshop, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run watch.sh. squeue, sinfo: lines of their stubs; by default the queue is empty, and Slurm knows no node."""

    def run(
        *arguments: str, squeue: str = NOT_IN_THE_QUEUE, sinfo: str = "exit 1", **variables: object
    ) -> subprocess.CompletedProcess:
        for name, lines in {"squeue": squeue, "sinfo": sinfo}.items():
            path = f"{program(tmp_path / 'bin', name, lines).parent}:{os.environ['PATH']}"
        command = [f"{workshop}/experiments/watch.sh", *arguments]
        environment = shell_environment(PATH=path, **variables)
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def running(workshop) -> Iterator[Path]:
    """The folder of a run without Slurm whose training waits."""
    folder = workshop / "experiments/mine/x"
    started = start_stub(folder, TRAINING, JOB_ID=ID, CUDA_VISIBLE_DEVICES="3")
    log = folder / f"log/x.slurm_{ID}.out"
    try:
        until(lambda: log.exists() and "error: disk" in log.read_text() and list(folder.glob("gpu_memory/*")))
        until(lambda: (folder / f"cpu_memory/cpu_memory_log_{ID}.txt").read_text().count("\n") > 1)
        until(lambda: (folder / f"gpu_memory/gpu_memory_log_{ID}.csv").read_text().count("\n") > 1)
        yield folder
        (folder / "go").touch()
        started.communicate(timeout=120)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)


def test_a_run_without_slurm_is_shown(running, watch, report):
    done = report(ID)
    line = f"error: --job: no run record has the id {ID}; experiments/watch.sh {ID} shows a job that waits, trains, or"
    assert done.returncode == 2 and done.stderr.startswith(line), done
    done = watch("--once", ID)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"job {ID} in experiments/mine/x", "running"]
    assert re.fullmatch(rf"log        log/x.slurm_{ID}.out, last line \d+ s ago", lines[2])
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
    assert re.fullmatch(rf"{host} +GPU 3 +\d+ of 32768 +93 %, 203 W", gpu), done


def add_log(workshop: Path, text: str) -> Path:
    log = workshop / "experiments/mine/x/log/x_4711.out"
    write(log, text)
    return log


def read_log(folder: Path) -> str:
    return (folder / f"log/x.slurm_{ID}.out").read_text()


def test_only_the_last_attempt_is_shown(running, watch):
    """The log of a job that Slurm restarts holds all attempts."""
    log, text = running / f"log/x.slurm_{ID}.out", read_log(running)
    earlier = "a long line\n" * 20000 + text.replace("step 40 of", "step 180 of") + "\nstatus: stopped (exit code 75)\n"
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
    log = folder / f"log/x.slurm_{ID}.out"
    log.write_text(read_log(folder).partition("=====")[0])
    assert "\nended, without a summary: see the end of its log\n" in watch(ID).stdout


def test_a_job_is_shown_although_slurm_does_not_answer(workshop, watch):
    lines = "job 4711\nunknown: Slurm does not answer\nlog        none yet\n"
    assert watch("4711", squeue=NO_ANSWER).stdout == lines, "the job may wait in the queue"
    add_log(workshop, "job 4711 of experiments/mine/x: site laptop\nnodes: n1\n")
    view = watch("4711", squeue=NO_ANSWER).stdout
    assert "\nunknown: Slurm does not answer\n" in view and "\nlast line  nodes: n1\n" in view
    view = watch("4711").stdout
    assert "\nended, without a summary: see the end of its log\n" in view
    add_log(workshop, LOG + ended("completed (exit code 0)"))
    assert "\nended, status: completed (exit code 0)\n" in watch("4711", squeue=NO_ANSWER).stdout


@pytest.mark.promise("the view of a job shows nothing as current that has ended or died")
def test_time_left_and_nodes_are_shown_only_while_the_job_runs(workshop, watch):
    log = add_log(workshop, LOG)
    view = watch("4711", squeue=RUNNING).stdout
    assert f"{STEP}, about 1:25 min left\nloss       7.125\n\nnode  " in view, view
    for squeue in (NOT_IN_THE_QUEUE, PENDING):
        assert watch("4711", squeue=squeue).stdout.endswith(f"{STEP}\nloss       7.125\n"), squeue
    for lines, step in (
        (ended("failed (exit code 1)"), STEP),
        (STOPPED + ended("stopped (exit code 75)"), "\nstep       135 of 800 (16 %), 8 steps/s"),
        (ended("completed (exit code 0)"), "\nstep       800 of 800 (100 %), 8 steps/s"),
    ):
        log.write_text(LOG + lines)
        view = watch("4711").stdout
        assert f"{step}\nloss       7.125\n\nstatus: " in view, view
    log.write_text(LOG.partition("step")[0] + STOPPED)
    view = watch("4711", squeue=RUNNING).stdout
    assert "\nstep       135 of 800 (16 %)\n" in view, "a job that stops before its first progress line"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("0, V100, 900, 32768, 71.23, 98", "900 of 32768 98 %, 71 W"),
        ("0, V100, 900, 32768, [N/A], 98", "900 of 32768 98 %"),
        ("0, V100, 900, 32768, 71.23, [Not Supported]", "900 of 32768 71 W"),
        ("0, GB10, [N/A], [N/A], 71.23, 98", "unknown 98 %, 71 W"),
        ("0, V100, 900, 32768", "900 of 32768"),
        ("0, V100, 900, 32768, 71.23, 98\n2026/11/20 22:00:00.000, 0, V100, 900, 32768, 71", "900 of 32768 98 %, 71 W"),
    ],
    ids=["all", "no power", "no load", "no memory", "five columns", "cut"],
)
def test_what_is_known_about_a_gpu_is_shown(workshop, watch, lines, shown):
    folder = add_log(workshop, LOG.replace("node1 node2 node3", "node1")).parent.parent
    write(folder / "gpu_memory/gpu_memory_log_4711.csv", f"{GPU_HEADER}\n2026/11/20 22:00:00.000, {lines}\n")
    done = watch("4711", squeue=RUNNING)
    assert not done.stderr
    *_, row = done.stdout.splitlines()
    assert " ".join(row.split()) == f"node1 GPU 0 {shown}"


@pytest.mark.promise("the view of a job shows nothing as current that has ended or died")
def test_a_node_that_does_not_answer_has_no_load(workshop, watch):
    folder = add_log(workshop, LOG).parent.parent
    for node in ("node1", "node2", "node3"):
        write(folder / f"cpu_memory/cpu_memory_log_4711_{node}.txt", cpu_log(869))
        write(folder / f"gpu_memory/gpu_memory_log_4711_{node}.csv", gpu_log(900))
    for kind in ("cpu_memory/cpu_memory_log_4711_node1.txt", "gpu_memory/gpu_memory_log_4711_node1.csv"):
        minutes_ago = time.time() - 600
        os.utime(folder / kind, (minutes_ago, minutes_ago))
    # In two partitions a node has two lines
    sinfo = "[[ $* = *--nodes=node[[]1-3]* ]] && printf 'node1 mixed\nnode2 mixed*\nnode2 mixed*\nnode3 draining\n'"
    view = watch("4711", squeue=RUNNING, sinfo=sinfo).stdout
    assert max(map(len, view.splitlines())) <= 80, view
    rows = [" ".join(line.split()) for line in view.partition("\nnode  ")[2].splitlines()[1:]]
    rows = [re.sub(r"for 6\d\d s", "for 600 s", row) for row in rows]
    assert rows == [
        "node2 does not answer (mixed*)",
        "node3 is draining in Slurm",
        "node1 CPU 869 no sample for 600 s",
        "node1 GPU 0 900 of 32768 no sample for 600 s",
        "node3 CPU 869 99 % of one core",
        "node3 GPU 0 900 of 32768 98 %, 71 W",
    ]
    assert "does not answer" not in watch("4711", squeue=NO_ANSWER, sinfo=sinfo).stdout.partition("\nnode  ")[2]


def test_samples_of_an_earlier_attempt_are_left_out(workshop, watch):
    """Slurm has restarted the job. Its logger on the CPU has written its header, and nvidia-smi has not started yet."""
    folder = add_log(workshop, LOG.replace("node1 node2 node3", "node1")).parent.parent
    cpu, gpu = folder / "cpu_memory/cpu_memory_log_4711.txt", folder / "gpu_memory/gpu_memory_log_4711.csv"
    write(cpu, f"{cpu_log(869)}{CPU_HEADER}\n")
    write(gpu, gpu_log(900))
    os.utime(gpu, (time.time() - 600, time.time() - 600))
    running = RUNNING.replace("N/A", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 60)))
    assert watch("4711", squeue=running).stdout.splitlines()[-1].split() == ["node", "memory", "(MiB)", "load"]
    for log, sample in ((cpu, cpu_log(77)), (gpu, gpu_log(78))):
        with log.open("a") as file:
            file.write(sample)
    rows = watch("4711", squeue=running).stdout.splitlines()[-2:]
    assert [row.split()[1:4] for row in rows] == [["CPU", "77", "99"], ["GPU", "0", "78"]]


def test_before_the_first_step_the_last_line_that_helps_is_shown(workshop, watch):
    log = add_log(workshop, LOG.partition("step")[0] + "reading data\n")
    noise = (
        f"{'=' * 60}\nAttaching to process 77\n{{'loss': '7.5', 'epoch': '1'}}\nsrun: no support for cpu binding\n\n"
    )
    with log.open("a") as file:
        file.write(noise)
    assert "\nlast line  reading data\nloss       7.5\n" in watch("4711", squeue=RUNNING).stdout
    with log.open("a") as file:
        file.write("slurmstepd: error: *** JOB 4711 CANCELLED DUE TO NODE FAILURE ***\n")
    assert "\nlast line  slurmstepd: error: *** JOB 4711 CANCELLED DUE TO" in watch("4711").stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["4711"], "4711: no job in Slurm's queue and no log in experiments/ has this id; squeue --me lists your jobs"),
        (["../x"], "../x: no job in Slurm's queue and no log in experiments/ has this id; "),
        ([], "watch.sh: no job in Slurm's queue and no log in experiments/ has this id; "),
        (["1", "2"], "command line: unrecognized arguments: 2; see --help"),
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
    assert "Summary of 4711: ddp/2_gpus (completed, tiny-bloom)" in done.stdout, done
    assert done.stdout.endswith("run record: experiments/ddp/2_gpus/results/4711.json\n")
    assert report("results/4711.json", folder).stdout.endswith("run record: results/4711.json\n")
    elsewhere = add_run(tmp_path, "mine", "local-20261126-113000-4712")
    for end in ("…4712", "...113000-4712"):  # as a table shows a long id
        assert report(end, elsewhere).stdout.endswith("run record: results/local-20261126-113000-4712.json\n")
    assert "no run record has the id 712;" in report("712", elsewhere).stderr
    add_run(workshop, "baseline", "4711")
    both = "experiments/baseline/results/4711.json, experiments/ddp/2_gpus/results/4711.json"
    line = f"error: --job: 2 runs have the id 4711: {both}; give the path of one\n"
    assert (report("4711").returncode, report("4711").stderr) == (2, line)
