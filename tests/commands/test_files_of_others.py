"""A file that one participant left must not end or hang what others start: report, class, view and sweep."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from class_files import START, add_job
from report_files import write
from shell import program, shell_environment

# root may read every file, so take this right from the commands
WITHOUT_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
EXPERIMENT = "baseline"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {  # what a file becomes, and the reason that is shown
    "mode 0": (lambda path: write(path, "secret") or path.chmod(0), "Permission denied"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "No such file or directory"),
    "link to itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "pipe": (os.mkfifo, "Not a regular file"),
    "folder": (Path.mkdir, "Is a directory"),
}
CONTENTS: dict[str, tuple[Callable[[Path], object], str]] = {  # a readable file that is not a record, or is damaged
    "binary": (lambda path: write(path, bytes(range(256)) * 9), "is not a valid run record (the file: Invalid JSON: "),
}


@pytest.fixture
def clone(workshop) -> Path:
    """A participant with one good run, and one completed run per damage of each file. Job 1 is good."""
    folder = add_job(workshop, EXPERIMENT, "1", START, "completed", gpus=1).resolve()
    for number, (damage, _) in enumerate({**DAMAGE, **CONTENTS}.values()):
        damage_run(workshop, f"{number}1", f"results/{number}1.json", damage)
    for number, (damage, _) in enumerate(DAMAGE.values()):
        damage_run(workshop, f"{number}2", f"log/baseline_{number}2.out", damage)
        damage_run(workshop, f"{number}3", f"cpu_memory/cpu_memory_log_{number}3.txt", damage)
        damage_run(workshop, f"{number}4", f"gpu_memory/gpu_memory_log_{number}4.csv", damage)
        (folder / "results" / f".{number}4").mkdir()
        damage(folder / "results" / f".{number}4" / ".lock")
    return workshop


def damage_run(clone: Path, job_id: str, name: str, damage: Callable[[Path], object]) -> None:
    path = add_job(clone, EXPERIMENT, job_id, START, "completed", gpus=1) / name
    path.unlink()
    damage(path)


@pytest.fixture
def run(clone, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command of the clone as a user who is not root. Slurm's queue is empty."""
    queue = program(tmp_path / "bin", "squeue", "exit 0").parent

    def start(*words: object, cwd: Path = clone) -> subprocess.CompletedProcess:
        environment = shell_environment(PYTHONPATH=clone / "scripts", MPLCONFIGDIR=tmp_path)
        environment["PATH"] = f"{queue}:{environment['PATH']}"
        command = [*WITHOUT_ROOT, *map(str, words)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)

    return start


def expected_reasons() -> dict[str, str]:
    """Return the reason for each damaged file, by its name."""
    reasons = {f"{number}1.json": reason for number, (_, reason) in enumerate({**DAMAGE, **CONTENTS}.values())}
    for number, (_, reason) in enumerate(DAMAGE.values()):
        reasons |= {f"baseline_{number}2.out": reason}
        reasons |= {f"cpu_memory_log_{number}3.txt": reason, f"gpu_memory_log_{number}4.csv": reason}
    return reasons


def test_the_report_names_each_file_and_the_class_counts_no_failure(clone, run):
    done = run(sys.executable, "scripts/report.py", "-o", "report")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("22 runs, ")
    page = (clone / "report/index.html").read_text()
    text = " ".join(re.sub("<[^>]*>", "", page).split())
    for name, reason in expected_reasons().items():
        assert re.search(rf"{re.escape(name)}: ([a-z ]*\()?{re.escape(reason)}", text), name
    done = run(sys.executable, "scripts/report.py", "--class", clone, "-o", "report")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("1 participant, 22 jobs: ")
    assert "<p>No failed job.</p>" in (clone / "report/class.html").read_text()


def test_a_closed_folder_is_not_taken_for_an_empty_one(tmp_path, run):
    closed = tmp_path / "exam/results"
    closed.mkdir(parents=True)
    closed.chmod(0)
    for words in ([closed], [closed.parent], ["-o", closed / "report", EXPERIMENT]):
        done = run(sys.executable, "scripts/report.py", *words)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(f"error: {closed}") and ": may not be read by you; ask its owner" in done.stderr


def test_one_job_is_shown_or_refused_in_one_line(run):
    for number, (_, reason) in enumerate(DAMAGE.values()):
        done = run(sys.executable, "scripts/report.py", "--job", f"{number}1")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert done.stderr.startswith("error: ") and f"{number}1.json: {reason}; " in done.stderr
        for job in (2, 3, 4):
            done = run(sys.executable, "scripts/report.py", "--job", f"{number}{job}")
            assert (done.returncode, done.stderr) == (0, "") and reason in done.stdout, done


def test_the_view_gives_the_reason_and_claims_no_end(run):
    for number, (_, reason) in enumerate(DAMAGE.values()):
        done = run("experiments/watch.sh", f"{number}2")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"\nended, its log cannot be read: {reason}\n" in done.stdout
        for job in (1, 3, 4):
            view = run("experiments/watch.sh", f"{number}{job}").stdout
            assert "\nended, status: completed (exit code 0)\n" in view


def test_the_sweep_of_a_job_continues_after_them(clone, run):
    folder = clone / "experiments" / EXPERIMENT
    add_job(clone, EXPERIMENT, "99", START, "running")
    words = "from pathlib import Path; from job.end_of_job import sweep; sweep(Path('results'))"
    done = run(sys.executable, "-c", words, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "results/99.json: the job is gone, and its status is now failed\n"), (
        done
    )
