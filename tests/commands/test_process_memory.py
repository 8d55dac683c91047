"""Test of the peak memory that a training run reports for its own process."""

import subprocess
import sys

from helpers import REPOSITORY

PEAK = """
import sys
sys.path.insert(0, "scripts")
from measure.measured_memory import peak_process_mib
before = peak_process_mib()
held = b"1" * 2**28
del held
print(before, peak_process_mib())
"""


def test_peak_of_a_process_does_not_include_its_parent():
    """getrusage would include the parent's peak, because an exec does not reset its value."""
    held = b"1" * 2**30
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 50 < before < len(held) / 2**20 / 2
    assert before + 200 < after < before + 300
