"""Tests of `run_and_exit`: the exit code, stdout and stderr of a script that runs with or without ranks."""

import os
import subprocess
import sys

import pytest

from helpers import REPOSITORY


@pytest.mark.parametrize(
    ("world", "end", "code", "printed"),
    [
        (None, "", 0, ""),
        (None, "raise WorkshopError('--x', 'y', 'z', 3)", 3, "error: --x: y; z\n"),
        ("1", "", 0, ""),
        ("1", "raise WorkshopError('--x', 'y', 'z', 3)", 3, "error: --x: y; z\n"),
        ("1", "1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_script_of_ranks_ends_with_its_exit_code(world, end, code, printed):
    program = (
        f"from shared.errors import WorkshopError\nfrom distributed import process_group\n"
        f"def main():\n    print('out', end='')\n    {end}\nprocess_group.run_and_exit(main)"
    )
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}/scripts"} | ({"WORLD_SIZE": world} if world else {})
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "out")
    assert printed in done.stderr
