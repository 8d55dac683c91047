"""Tests of an experiment's script without Slurm: bash, job.sh, its loggers, and a few lines of Python as training."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from helpers import REPOSITORY, Finished, directives, until
from records.schema import read_attempts
from shell import program, shell_environment
from workbench import Bench, Running, command_line

# Begin a training run as train.py does: write a record with status running, and end with 75 on a signal
BEGIN = """
import atexit, json, os, pathlib, signal, time
path = pathlib.Path("results") / (os.environ["JOB_ID"] + ".json")
attempt = int(os.environ["ATTEMPT"])
path.write_text(json.dumps({"status": "running", "attempt": attempt}))
end = {"status": "completed", "attempt": attempt, "exit_code": 0, "finished": "2026-11-20T10:00:00+00:00"}
atexit.register(lambda: path.write_text(json.dumps(end)))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda *_: os._exit(75))
print("begun", flush=True)
"""
UNTIL_GO = "while not os.path.exists('go'): time.sleep(0.05)"
# In place of signal.pause(), which would miss a signal that comes right after SIGCONT
FOREVER = "while True: time.sleep(0.05)"
PROCESS, GROUP = os.kill, os.killpg


def experiment(bench: Bench, training: str) -> Path:
    """Create an experiment in a copy of experiments/ below the bench, and return its folder."""
    experiments = bench.folder / "experiments"
    if not experiments.exists():
        (experiments / "mine/x/log").mkdir(parents=True)
        for name in ("job.sh", "load_site.sh"):
            shutil.copy(REPOSITORY / "experiments" / name, experiments)
        shutil.copytree(REPOSITORY / "experiments/sites", experiments / "sites")
    folder = experiments / "mine/x"
    (folder / "x.slurm").write_text(directives(1, 1) + f'source ../../job.sh\nrun_python {training} "$@"\n')
    return folder


def start(bench: Bench, code: str, words: str = "bash x.slurm", **options: object) -> Running:
    """Start a job whose training is `code`."""
    folder = experiment(bench, "code.py")
    (folder / "code.py").write_text(BEGIN + code)
    given = shell_environment(JOB_ID="7", CUDA_VISIBLE_DEVICES="0")  # otherwise the site laptop hides the logger's GPU
    variables = dict.fromkeys(bench.server.environment, "unset") | given | options
    return bench.start("-c", words, script="bash", cwd=folder, **variables)


def log(started: Running | Finished) -> str:
    return "".join(path.read_text() for path in (started.folder / "log").glob("*.out"))


def wait_until_training(started: Running) -> Running:
    """Wait until the training has written its record and the loggers run."""
    logs = started.folder / "gpu_memory"
    started.until(lambda: "begun" in log(started) and any(path.stat().st_size for path in logs.glob("*")))
    return started


def living_commands(bench: Bench, word: str) -> list[str]:
    return [line for line in map(command_line, bench.server.living()) if word in line]


def check_end(ended: Finished, code: int, status: str) -> None:
    assert ended.code == code, str(ended)
    assert (ended.record["status"], ended.record["exit_code"]) == (status, code), ended.record
    assert not list(ended.folder.glob("results/.*/*")), "the lock must be gone"


SIGNALS = {
    "closed terminal": (signal.SIGHUP, GROUP),
    "USR1": (signal.SIGUSR1, PROCESS),
    "TERM": (signal.SIGTERM, PROCESS),
    "Ctrl-C": (signal.SIGINT, GROUP),
}


@pytest.mark.parametrize(("number", "send"), SIGNALS.values(), ids=SIGNALS)
def test_a_signal_to_the_job_script_saves_a_checkpoint(bench: Bench, number, send):
    started = wait_until_training(start(bench, "signal.pause()"))
    send(started.pids[0], number)
    check_end(started.wait(), 75, "stopped")
    assert not living_commands(bench, "code.py")


def test_signals_at_the_end_of_a_job_do_not_replace_its_exit_code(bench: Bench):
    """job.sh passes on the Ctrl-C that all processes of the terminal have received, and may be late."""
    started = wait_until_training(start(bench, "signal.pause()"))
    (run_job,) = (each for each in bench.server.living() if "run_job.py" in command_line(each))
    while started.code is None and command_line(run_job):
        with contextlib.suppress(psutil.NoSuchProcess):
            run_job.send_signal(signal.SIGINT)
        started.server.wait(started.pids[0], 0.002)
    check_end(started.wait(), 75, "stopped")


@pytest.mark.promise("reliability 11")
def test_nothing_outlives_a_killed_script(bench: Bench):
    started = wait_until_training(start(bench, "signal.pause()"))
    os.kill(started.pids[0], signal.SIGKILL)
    assert started.wait().code == -signal.SIGKILL
    until(lambda: not living_commands(bench, "code.py") and not living_commands(bench, "psrecord"))


def test_a_killed_training_is_a_failed_job(bench: Bench):
    check_end(start(bench, "os.kill(os.getpid(), 9)").wait(), 137, "failed")


def test_a_closed_pipe_does_not_end_a_job(bench: Bench):
    code = "for n in range(2000): print('line', n, flush=True)\n"
    ended = start(bench, code, words="set -o pipefail; bash x.slurm | head -1").wait()
    check_end(ended, 0, "completed")
    assert "line 1999" in log(ended)


@pytest.mark.promise("reliability 14")
def test_loggers_that_fail_are_reported(bench: Bench):
    for name in ("psrecord", "nvidia-smi"):
        program(bench.folder / "bin", name, "exit 1")
    ended = start(bench, "time.sleep(1)", PATH=f"{bench.folder}/bin:{shell_environment()['PATH']}").wait()
    check_end(ended, 0, "completed")
    assert "missing: psrecord on " in ended.out and "missing: nvidia-smi on " in ended.out, ended


REFUSED = {
    "a path as the id": ("JOB_ID: '../../../../precious' cannot name files; ", {"JOB_ID": "../../../../precious"}),
    "no such site": ("SITE: there is no experiments/sites/moon.sh; ", {"SITE": "moon"}),
    "script of another folder": (
        "../x/x.slurm: it does not belong to this folder, ",
        {"words": "mkdir -p ../y/log && cd ../y && bash ../x/x.slurm"},
    ),
    "dry run of a script of another folder": (
        "../x/x.slurm: it does not belong to this folder, ",
        {"words": "mkdir ../y && cd ../y && DRY_RUN=1 bash ../x/x.slurm"},
    ),
    "script of another folder in an allocation": (
        "../x/x.slurm: it does not belong to this folder, ",
        {"words": "mkdir -p ../y/log && cd ../y && bash ../x/x.slurm", "SLURM_JOB_ID": 7},
    ),
}


@pytest.mark.promise("reliability 15")
@pytest.mark.parametrize(("line", "options"), REFUSED.values(), ids=REFUSED)
def test_an_input_error_is_one_line_and_writes_nothing(bench: Bench, line, options):
    outside = bench.folder / "precious"
    outside.mkdir()
    ended = start(bench, "", **options).wait()
    assert ended.code == 2, ended
    assert ended.error.startswith(line), ended.error
    assert not (ended.folder / "results").exists() and outside.is_dir()


def test_a_missing_folder_for_records_is_one_error_line(bench: Bench):
    ended = start(bench, "", words="touch results && bash x.slurm").wait()
    assert ended.code == 3, ended
    assert "it cannot be written" in ended.error
    assert "begun" not in ended.out


IDS = {"JOB_ID": {}, "an allocation": {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 1}}


@pytest.mark.promise("reliability 10")
@pytest.mark.parametrize("variables", IDS.values(), ids=IDS)
def test_two_jobs_with_one_id(bench: Bench, variables):
    first = start(bench, UNTIL_GO, **variables)
    first.until(lambda: (first.folder / "results/7.json").exists())
    second = start(bench, UNTIL_GO, **variables)
    assert second.wait().code == 2
    line = "error: JOB_ID: another run of 7 is writing its files; "
    until(lambda: line in second.err)  # tee may write this line after the script's end
    (first.folder / "go").touch()
    check_end(first.wait(), 0, "completed")


@pytest.mark.promise("reliability 9")
def test_a_thawed_attempt_changes_nothing_of_the_next_one(bench: Bench):
    """The nodes of the first attempt hang, and Slurm restarts the job on other nodes. Then the first nodes continue."""
    variables = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 1, "REQUEUE": 1}
    first = start(bench, f"open('here', 'w').write(os.environ['RUN_DIR'])\n{FOREVER}", **variables)
    first.until(lambda: (first.folder / "here").exists() and (first.folder / "here").read_text())
    os.killpg(first.pids[0], signal.SIGSTOP)
    second = start(bench, f"open('here2', 'w')\n{UNTIL_GO}", SLURM_RESTART_COUNT=1, **variables)
    second.until((second.folder / "here2").exists)
    notes = Path((first.folder / "here").read_text(), "exit_codes")
    notes.write_text("1 1 launcher 1 on node2\n")  # as on_node.py does on the second node
    (second.folder / "go").touch()
    ended = second.wait()
    check_end(ended, 0, "completed")
    assert "status: completed (exit code 0)" in ended.out
    os.killpg(first.pids[0], signal.SIGCONT)
    os.killpg(first.pids[0], signal.SIGTERM)
    assert first.wait().code == 75
    check_end(ended, 0, "completed")
    attempts = read_attempts(ended.record_path)
    assert [(each.attempt, each.status) for each in attempts] == [(1, "failed"), (2, "completed")]
