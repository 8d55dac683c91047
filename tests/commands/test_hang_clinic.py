"""Tests of the hang clinic: each broken job fails as its page says, and each repaired job completes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import LAUNCHERS, REPOSITORY

HANGS = REPOSITORY / "exercises/hangs"
PROCESSES = {"straggler.py": 4}
JOBS = {
    # Of each job: the exit code as it is broken, and a pattern in its output as it is broken, and as it is repaired
    "skipped.py": (None, r"rank 1: done|step 1|Timed out|error", r"rank 1: done"),
    "port.sh": (0, r"EADDRINUSE", r"bob: rank 1 counts 2 ranks"),
    "world_size.sh": (0, r"[Tt]imed out", r"job: rank 1 counts 2 ranks"),
    "missing_file.py": (1, r"FileNotFoundError: .*disk_of_node1_", r"rank 1: done, \d+ bytes on each node"),
    "straggler.py": (0, r"rank 0: 0\.2\d s per step", r"rank 0: 0\.0\d s per step"),
    "host_memory.py": (
        1,
        r"exitcode  : -9 .*\n.*\n.*Signal 9 \(SIGKILL\) received",
        r"rank 1: done, trains on 125000 questions",
    ),
}
FURTHER = ("skipped.py", "port.sh", "world_size.sh", "host_memory.py")  # for `make test-faults`


def run(folder: str | Path, name: str, *words: object, cwd: Path = REPOSITORY):
    path = f"{folder}/{name}"
    launch = ["bash"] if name.endswith(".sh") else LAUNCHERS["torchrun"](PROCESSES.get(name, 2))
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*launch, path, *words], cwd=cwd, env=environment, timeout=300, check=False, **streams)


@pytest.mark.promise("exercises have gaps and a correct solution")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.faults) if name in FURTHER else name for name in JOBS]
)
def test_a_broken_job_fails_as_the_page_says_and_a_repaired_one_runs_to_its_end(name):
    broken, symptom, result = JOBS[name]
    for folder, code, words in (("exercises/hangs", broken, symptom), ("exercises/solution/hangs", 0, result)):
        done = run(folder, name)
        assert code in (None, done.returncode) and re.search(words, done.stdout), done.stdout


@pytest.mark.promise("when a run hangs, each rank that still runs leaves its last collectives")
def test_the_flight_records_show_the_collective_that_only_rank_0_called(tmp_path):
    done = run(HANGS, "watched.py", HANGS / "skipped.py", cwd=tmp_path)
    found = re.search(r"^error: hang: no progress of .* are in (results/\S+_flight_record)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    command = [sys.executable, HANGS / "compare.py", found[1]]
    compared = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    rows = [re.split(r"  +", line.strip()) for line in compared.splitlines()]
    assert rows == [
        ["group 0", "rank_0", "rank_1"],
        ["1", "gloo:all_reduce [[1, 4]]", "gloo:all_reduce [[1, 4]]"],
        ["2", "gloo:all_reduce [[1]]", "gloo:all_reduce [[1]]"],
        ["3", "gloo:all_reduce [[]]", "gloo:all_reduce [[1, 4]] WAITS", "<- differ"],
        ["4", "gloo:all_reduce [[1, 4]] WAITS", "-", "<- differ"],
    ]
