"""An experiment's script without Slurm: bash, job.sh, its loggers, and a few lines in place of the training."""

import os
import shutil
import signal
from pathlib import Path

from bench import Bench, Ended, Running, command_of
from cases_checkpoints import KEPT, moment
from cases_files import same_training
from helpers import REPOSITORY, directives
from shell import program, shell_environment
from table import case

# A training as train.py is: it has a record that says running, and saves on a signal. Then what the case wants
BEGIN = """
import atexit, json, os, pathlib, signal, time
path = pathlib.Path("results") / (os.environ["JOB_ID"] + ".json")
path.write_text(json.dumps({"status": "running", "exit_code": None, "finished": None}))
atexit.register(lambda: path.write_text(json.dumps({"status": "completed", "exit_code": 0, "finished": "now"})))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda *_: os._exit(75))
print("begun", flush=True)
"""
WAIT = "signal.pause()"


def start(bench: Bench, code: str, words: str = "bash x.slurm", lines: str = "", **options: object) -> Running:
    """Start an experiment of which the training is `code`, in a copy of experiments/ below the bench."""
    experiments = bench.folder / "experiments"
    if not experiments.exists():
        shutil.copytree(REPOSITORY / "experiments", experiments, ignore=only("job.sh", "load_site.sh", "sites"))
    folder = experiments / "mine/x"
    (folder / "log").mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(BEGIN + code)
    body = f'source ../../job.sh\n{lines}\nrun_python code.py "$@"\n'
    (folder / "x.slurm").write_text(directives(1, 1) + body)
    variables = dict.fromkeys(bench.server.environment, "unset") | shell_environment(JOB_ID="7") | options
    return bench.start("-c", words, script="bash", cwd=folder, **variables)


def only(*names: str):
    def leave_out(folder: str, content: list[str]) -> set[str]:
        return set(content) - {*names} if Path(folder).name == "experiments" else set()

    return leave_out


def begun(started: Running) -> Running:
    """Wait until the training has its record and the loggers run."""
    started.until(lambda: "begun" in log(started) and any(map(size, started.folder.glob("gpu_memory/*"))))
    return started


def size(path: Path) -> int:
    return path.stat().st_size


def log(started: Running) -> str:
    return "".join(path.read_text() for path in (started.folder / "log").glob("*.out"))


def ended_cleanly(ended: Ended, code: int, status: str) -> None:
    assert ended.code == code, ended
    assert (ended.record["status"], ended.record["exit_code"]) == (status, code), ended.record
    assert not list(ended.folder.glob("results/.*/*")), "the lock is gone"


def signalled(name: str, number: signal.Signals, group: bool) -> None:
    def act(bench: Bench) -> None:
        started = begun(start(bench, WAIT))
        (os.killpg if group else os.kill)(started.pids[0], number)
        ended = started.wait()
        ended_cleanly(ended, 75, "stopped")
        assert not alive(bench, "code.py"), ended

    whom = "all processes of the job" if group else "job.sh alone"
    seen = "the training saves and ends with 75, and so does the job; no process is left"
    case("job", name, f"{number.name} to {whom}", seen)(act)


def alive(bench: Bench, word: str) -> list[str]:
    return [line for line in map(command_of, bench.server.living()) if word in line]


signalled("terminal closed", signal.SIGHUP, group=True)
signalled("HUP", signal.SIGHUP, group=False)
signalled("USR1", signal.SIGUSR1, group=False)
signalled("TERM", signal.SIGTERM, group=False)
signalled("Ctrl-C", signal.SIGINT, group=True)


@case("job", "killed", "kill -9 of job.sh", "the training is told to end with it: no process is left")
def job_killed(bench: Bench):
    started = begun(start(bench, WAIT))
    started.signal(signal.SIGKILL)
    assert started.wait().code == -signal.SIGKILL
    bench.until(lambda: not alive(bench, "code.py") and not alive(bench, "psrecord"))


@case("job", "training killed", "kill -9 of the training", "exit 137, record failed")
def training_killed(bench: Bench):
    ended = start(bench, "os.kill(os.getpid(), 9)").wait()
    ended_cleanly(ended, 137, "failed")


@case("job", "head", "bash x.slurm | head -1", "the training goes on to its end, exit 0, record completed")
def job_into_head(bench: Bench):
    code = "for n in range(2000): print('line', n, flush=True)\n"
    ended = start(bench, code, words="set -o pipefail; bash x.slurm | head -1").wait()
    ended_cleanly(ended, 0, "completed")
    assert "line 1999" in "".join(path.read_text() for path in (ended.folder / "log").glob("*.out"))


def refused(name: str, done: str, line: str, code: int = 2, words: str = "bash x.slurm", **variables: object) -> None:
    def act(bench: Bench) -> None:
        outside = bench.folder / "precious"
        outside.mkdir()
        ended = start(bench, "", words, **variables).wait()
        assert ended.code == code, ended
        assert ended.error.startswith(line), ended.error
        assert not (ended.folder / "results").exists() and outside.is_dir()

    case("job", name, done, f"exit {code}: {line}..., nothing written or removed")(act)


for name, job_id in (("path", "../../../../precious"), ("hidden", ".."), ("folder", "a/b")):
    refused(f"id: {name}", f"JOB_ID={job_id[:20]}", f"JOB_ID: '{job_id}' cannot name files; ", JOB_ID=job_id)
    of_slurm = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NUM_NODES": 1}
    if name == "path":
        refused("Slurm's id", f"SLURM_JOB_ID={job_id}", f"JOB_ID: '{job_id}' cannot name files; ", **of_slurm)
refused("no site", "SITE=moon", "SITE: there is no experiments/sites/moon.sh; ", SITE="moon")
refused(
    "another's script",
    "the script of another experiment's folder",
    "../x/x.slurm: it is not of this folder, ",
    words="mkdir -p ../y/log && cd ../y && bash ../x/x.slurm",
)


@case("job", "two at once", "two jobs of one JOB_ID", "exit 2 for the second, the first unharmed")
def two_jobs_at_once(bench: Bench):
    first = begun(start(bench, "while not os.path.exists('go'): time.sleep(0.05)"))
    second = start(bench, "while not os.path.exists('go'): time.sleep(0.05)").wait()
    assert second.code == 2, second
    assert second.error.startswith("JOB_ID: another run of 7 is writing its files; "), second
    (first.folder / "go").touch()
    ended_cleanly(first.wait(), 0, "completed")


@case("job", "two in an allocation", "two jobs in one salloc, which have one id", "exit 2 for the second")
def two_jobs_in_an_allocation(bench: Bench):
    slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 1}
    first = start(bench, "while not os.path.exists('go'): time.sleep(0.05)", **slurm)
    first.until(lambda: (first.folder / "results/7.json").exists())
    second = start(bench, "", **slurm).wait()
    assert second.code == 2, second
    assert second.error.startswith("JOB_ID: another run of 7 is writing its files; "), second
    (first.folder / "go").touch()
    ended_cleanly(first.wait(), 0, "completed")


@case("job", "earlier attempt", "files of a killed attempt: exit codes, gaps", "they decide nothing: exit 0, completed")
def earlier_attempt(bench: Bench):
    left = bench.folder / "experiments/mine/x/results/.7"
    start(bench, "").wait()
    left.mkdir()
    (left / "exit_codes").write_text("1 9 node\n")
    (left / "gaps").write_text("an old gap\n")
    ended = start(bench, "").wait()
    ended_cleanly(ended, 0, "completed")
    assert "an old gap" not in ended.out


@case("job", "results is a file", "a file where results/ should be", "exit 3 and one line; the training is not started")
def results_is_a_file(bench: Bench):
    ended = start(bench, "", words="rm -rf results && touch results && bash x.slurm").wait()
    assert ended.code == 3, ended
    assert "it cannot be written" in ended.error
    assert "begun" not in ended.out


def logger(bench: Bench, lines: str) -> str:
    """PATH on which nvidia-smi is these lines."""
    program(bench.folder / "bin", "nvidia-smi", lines)
    return f"{bench.folder}/bin:{shell_environment()['PATH']}"


@case("logs", "no logger", "neither psrecord nor nvidia-smi can run", "the training goes on; the summary names both")
def no_logger(bench: Bench):
    path = logger(bench, "exit 1")
    program(bench.folder / "bin", "psrecord", "exit 1")
    ended = start(bench, "time.sleep(1)", PATH=path).wait()
    ended_cleanly(ended, 0, "completed")
    assert "missing: psrecord on " in ended.out and "missing: nvidia-smi on " in ended.out, ended


# Sends the signal to job.sh, and waits until job.sh has passed it on
TERM_TO_JOB = """seen = []
        handler = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *noted: (handler(*noted), seen.append(True)))
        os.kill(os.getppid(), signal.SIGTERM)
        while not seen:
            time.sleep(0.01)"""


@case(
    "job",
    "of train.py",
    "SIGTERM to job.sh while train.py is in a step, then the same job again",
    "exit 75; it goes on to the same weights and losses, as the same job",
    slow="a new interpreter for every program",
)
def job_of_train(bench: Bench):
    reference = bench.reference(*KEPT)
    bench.patched(f"import time\n{moment('transformers.Trainer.training_step', 3, TERM_TO_JOB)}")
    options = {"DATASET": bench.folder / "data/squad_sample.json", "OMP_NUM_THREADS": 1}
    start(bench, "", **options).wait()
    folder = bench.folder / "experiments/mine/x"
    script = folder / "x.slurm"
    shutil.rmtree(folder / "results")
    for path, code in (("../../../patched.py", 75), ("../../../scripts/train.py --resume_from_checkpoint", 0)):
        script.write_text(directives(1, 1) + f'source ../../job.sh\nrun_python {path} "$@"\n')
        variables = dict.fromkeys(bench.server.environment, "unset") | shell_environment(JOB_ID="7") | options
        words = " ".join(map(str, KEPT))
        ended = bench.start("-c", f"bash x.slurm {words}", script="bash", cwd=folder, **variables).wait()
        assert ended.code == code, ended
    assert same_training(ended, reference)
    assert (ended.record["attempt"], ended.record["train"]["steps"]) == (2, 4)
