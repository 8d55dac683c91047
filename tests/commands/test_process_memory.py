"""What psrecord and the training itself say of the memory of processes that start others."""

import subprocess
import sys

from helpers import REPOSITORY
from reporting.memory_logs import CPU_HEADER, read_cpu_log

FORKING = """
import os, sys
held = b"1" * 2**28
print("holds it", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
os.wait()
sys.stdin.readline()
"""
PEAK = """
import sys
sys.path.insert(0, "scripts")
from training.record import peak_process_mib
before = peak_process_mib()
held = b"1" * 2**28
del held
print(before, peak_process_mib())
"""


def test_forked_child_is_left_out_of_the_peak(tmp_path):
    """As it is up to its exec: it shares all memory with its parent, and psrecord counts that twice."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 0}
    parent = subprocess.Popen([sys.executable, "-c", FORKING], **pipes)
    parent.stdout.readline()
    psrecord = [sys.executable, "-c", "from psrecord import main; main()", str(parent.pid)]
    logger = subprocess.Popen([*psrecord, "--include-children", "--interval", "0.1"], stdout=subprocess.PIPE, text=True)

    def sample(least: float, most: float) -> str:
        """The next line of psrecord's with that much real memory in MiB."""
        return next(line for line in logger.stdout if line[0] == " " and least < float(line.split()[2]) < most)

    try:
        lines = [sample(256, 400)]
        parent.stdin.write("fork\n")
        lines.append(sample(512, 800))
        parent.stdin.write("end the child\n")
        lines.append(sample(256, 400))
        parent.stdin.write("end\n")
        logger.communicate()
    finally:
        logger.kill()
        parent.kill()
        parent.communicate()
    path = tmp_path / "cpu.txt"
    path.write_text(f"{CPU_HEADER}\n" + "".join(lines))
    log = read_cpu_log(path)
    assert log.peak("process") < 400
    doubled = float(lines[1].split()[2])
    assert log.left_out() == f"1 sample of {doubled:,.0f} MiB left out: a forked child was counted with its parent"


def test_peak_of_a_process_is_its_own_and_not_of_who_started_it():
    """getrusage's is: an exec leaves it as it was."""
    held = b"1" * 2**30
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 50 < before < len(held) / 2**20 / 2
    assert before + 200 < after < before + 300
